"""The stages of a batch norm between which processes exchange statistics, all in one process."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from apex.ops import _library
from apex.ops.batch_norm import BatchNormSpec, reference, stages
from tests.harness import Route, assert_close, assert_equal_bits, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def packed(means: Tensor, variances: Tensor, counts: Tensor) -> Tensor:
    return torch.cat((means, variances * counts[:, None], counts[:, None]), 1)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("counts", [(30, 0, 6), (1, 0, 0), (0, 0, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_joined_statistics(route: Route, counts: tuple[int, ...], dtype: torch.dtype) -> None:
    x = 50 + torch.randn(sum(counts), 7, device=route.device)
    running = [torch.full((14,), 2.0, device=route.device).to(dtype)[::2] for _ in range(2)]
    spec = BatchNormSpec(momentum=0.25)
    with _library.implementation(route.implementation):
        means, variances = zip(*(stages.local_statistics(each, spec) for each in x.split(counts)), strict=True)
        parts = packed(torch.stack(means), torch.stack(variances), torch.tensor(counts, device=x.device).float())
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
def test_stages_put_together_over_parts_of_different_sizes(route: Route) -> None:
    """What processes with different batches do, the exchange being a sum: equal to the norm of the joined batch."""
    spec = BatchNormSpec(relu=True)
    x, z, dy = (torch.randn(6, 5, 3, 4, device=route.device) for _ in range(3))
    weight, bias = (torch.rand(5, device=route.device) for _ in range(2))
    parts = [[each[:4] for each in (x, z, dy)], [each[4:] for each in (x, z, dy)], [each[6:] for each in (x, z, dy)]]
    with _library.implementation(route.implementation):
        means, variances = zip(*(stages.local_statistics(each[0], spec) for each in parts), strict=True)
        counts = torch.tensor([48.0, 24.0, 0.0], device=route.device)
        mean, variance = stages.joined_statistics(packed(torch.stack(means), torch.stack(variances), counts))
        outputs = [stages.normalise(x, z, mean, variance, weight, bias, spec) for x, z, _ in parts]
        found = [
            stages.gradient_sums(dy, x, y, mean, variance, weight, bias, spec, True)
            for (x, _, dy), y in zip(parts, outputs, strict=True)
        ]
        plain, along = sum(each[1] for each in found), sum(each[2] for each in found)
        gradients = [
            stages.input_gradient(dy, x, y, mean, variance, weight, bias, plain, along, 1 / 72, spec)
            for (x, _, dy), y in zip(parts, outputs, strict=True)
        ]
    leaves = [each.double().requires_grad_() for each in (x, z, weight, bias)]
    expected = (functional.batch_norm(leaves[0], None, None, *leaves[2:], True) + leaves[1]).relu()
    dx, dz, dweight, dbias = torch.autograd.grad(expected, leaves, dy.double())
    assert_close(torch.cat(outputs), expected)
    assert_close(torch.cat(gradients), dx)
    assert_close(torch.cat([each[0] for each in found]), dz)
    assert_close(along, dweight, reduction=72)
    assert_close(plain, dbias, reduction=72)
