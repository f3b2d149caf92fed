"""The stages of a batch norm between which processes exchange statistics, all in one process."""

import pytest
import torch
from torch.nn import functional

from apex.ops import _library
from apex.ops.batch_norm import BatchNormSpec, reference, stages
from tests.harness import Route, assert_close, assert_equal_bits, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("counts", [(30, 0, 6), (1, 0, 0), (0, 0, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_joined_statistics(route: Route, counts: tuple[int, ...], dtype: torch.dtype) -> None:
    x = 50 + torch.randn(sum(counts), 7, device=route.device)
    running = [torch.full((14,), 2.0, device=route.device).to(dtype)[::2] for _ in range(2)]
    spec = BatchNormSpec(momentum=0.25)
    with _library.implementation(route.implementation):
        parts = torch.stack([stages.statistics_packet(each, spec) for each in x.split(counts)])
        mean, variance = stages.joined_statistics(parts)
        again = stages.joined_statistics(parts, 0.25, *running)
    assert_equal_bits((mean, variance), again)
    wanted = [torch.full((7,), 2.0, device=x.device).double() for _ in range(2)]
    if len(x):
        exact = reference.statistics(x.double(), spec)
        assert_close(mean, exact[0], reduction=max(counts))
        assert_close(variance, exact[1], reduction=max(counts))
        reference.update_running(*wanted, *exact, len(x), 0.25)
    else:
        assert not mean.any()
        assert not variance.any()
    for ours, right in zip(running, wanted, strict=True):
        assert_close(ours, right, reduction=max(1, *counts))


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("last", [False, True])
def test_a_packet_of_statistics(route: Route, last: bool) -> None:
    x = 1000 + torch.randn(3, 70, 5, 4, device=route.device) / 10
    x = x.movedim(1, -1).contiguous() if last else x
    spec = BatchNormSpec(channel_dim=-1 if last else 1)
    with _library.implementation(route.implementation):
        packet = stages.statistics_packet(x, spec)
    mean, variance = reference.statistics(x.double(), spec)
    assert packet.shape == (141,)
    assert packet[-1] == 60
    assert_close(packet[:70], mean)
    # Means of parts near 1000 are rounded by up to 3e-5, and differ by 0.02: their squares in 0.01 are off by 1e-4.
    torch.testing.assert_close(packet[70:-1].cpu().double() / 60, variance.cpu(), rtol=3e-4, atol=0)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("addend", [False, True])
def test_stages_put_together_over_parts_of_different_sizes(route: Route, addend: bool) -> None:
    """What processes with different batches do, the exchange being a sum: equal to the norm of the joined batch."""
    spec = BatchNormSpec(relu=True)
    x, z, dy = (torch.randn(6, 5, 3, 4, device=route.device) for _ in range(3))
    weight, bias = (torch.rand(5, device=route.device) for _ in range(2))
    parts = [[each[:4] for each in (x, z, dy)], [each[4:] for each in (x, z, dy)], [each[6:] for each in (x, z, dy)]]
    with _library.implementation(route.implementation):
        packets = torch.stack([stages.statistics_packet(each[0], spec) for each in parts])
        mean, variance = stages.joined_statistics(packets)
        norm = (mean, variance, weight, bias, spec)
        outputs = [stages.normalise(x, z if addend else None, *norm) for x, z, _ in parts]
        asked = outputs if addend else [None] * len(parts)
        found = [stages.gradient_packet(dy, x, y, *norm, addend) for (x, _, dy), y in zip(parts, asked, strict=True)]
        packet = torch.stack([each[3] for each in found]).sum(0)
        gradients = [
            stages.joined_input_gradient(dy, x, y, *norm[:4], packet, spec)
            for (x, _, dy), y in zip(parts, asked, strict=True)
        ]
        plain, along = sum(each[1] for each in found), sum(each[2] for each in found)
        same = [
            stages.input_gradient(dy, x, y, *norm[:4], plain, along, 1 / 72, spec)
            for (x, _, dy), y in zip(parts, asked, strict=True)
        ]
    leaves = [each.double().requires_grad_() for each in (x, z, weight, bias)]
    expected = functional.batch_norm(leaves[0], None, None, *leaves[2:], True)
    expected = (expected + leaves[1] if addend else expected + 0 * leaves[1]).relu()
    dx, dz, dweight, dbias = torch.autograd.grad(expected, leaves, dy.double())
    assert_close(torch.cat(outputs), expected)
    assert_close(torch.cat(gradients), dx)
    assert_close(torch.cat(same), dx)
    if addend:
        assert_close(torch.cat([each[0] for each in found]), dz)
    assert packet[-1] == 72
    for sums, right in ((plain, dbias), (packet[:5], dbias), (along, dweight), (packet[5:-1], dweight)):
        assert_close(sums, right, reduction=72)
