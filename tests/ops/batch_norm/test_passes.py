"""The passes of a batch norm between which processes exchange rank statistics, all in one process."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from apex.ops import _library
from apex.ops.batch_norm import BatchNormSpec, Channels, backward, forward, passes, rank_statistics, statistics
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")


class Given:
    """An exchange with others whose statistics are known."""

    averaged_ranks = 0

    def __init__(self, *others: Tensor) -> None:
        self.others = others

    def gather(self, rank_stats: Tensor) -> Tensor:
        return torch.stack((rank_stats, *self.others))

    def add_up(self, rank_stats: Tensor) -> None:
        for other in self.others:
            rank_stats += other


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("counts", [(30, 0, 6), (1, 0, 0), (0, 0, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_statistics_of_several_ranks(route: Route, counts: tuple[int, ...], dtype: torch.dtype) -> None:
    x = 50 + torch.randn(sum(counts), 7, device=route.device)
    running = [torch.full((14,), 2.0, device=route.device).to(dtype)[::2] for _ in range(2)]
    spec = BatchNormSpec(momentum=0.25)
    with _library.implementation(route.implementation):
        own, *others = x.split(counts)
        exchange = Given(*(rank_statistics(each, 1) for each in others))
        mean, variance = statistics(own, spec, exchange=exchange)
        again = statistics(own, spec, *running, exchange)
    assert_equal_bits((mean, variance), again)
    wanted = [torch.full((7,), 2.0, device=x.device).double() for _ in range(2)]
    if len(x):
        wide = x.double()
        assert_close(mean, wide.mean(0), reduction=max(counts))
        assert_close(variance, wide.var(0, correction=0), reduction=max(counts))
        unbiased = wide.var(0) if len(x) > 1 else torch.zeros_like(mean).double()
        wanted = [0.75 * 2 + 0.25 * new for new in (wide.mean(0), unbiased)]
    else:
        assert not mean.any()
        assert not variance.any()
    for ours, right in zip(running, wanted, strict=True):
        assert_close(ours, right, reduction=max(1, *counts))


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("last", [False, True])
def test_rank_statistics(route: Route, last: bool) -> None:
    x = 1000 + torch.randn(3, 70, 5, 4, device=route.device) / 10
    variance, mean = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    x = x.movedim(1, -1).contiguous() if last else x
    with _library.implementation(route.implementation):
        rank_stats = rank_statistics(x, -1 if last else 1)
    assert rank_stats.shape == (141,)
    assert rank_stats[-1] == 60
    assert_close(rank_stats[:70], mean)
    # Means of parts near 1000 are rounded by up to 3e-5, and differ by 0.02: their squares in 0.01 are off by 1e-4.
    torch.testing.assert_close(rank_stats[70:-1].cpu().double() / 60, variance.cpu(), rtol=3e-4, atol=0)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("addend", [False, True])
@pytest.mark.parametrize("averaged_ranks", [0, 3])
def test_ranks_with_batches_of_different_sizes(route: Route, addend: bool, averaged_ranks: int) -> None:
    """Equal to the norm of the joined batch; one rank has no values."""
    spec = BatchNormSpec(relu=True)
    x, z, dy = (torch.randn(6, 5, 3, 4, device=route.device) for _ in range(3))
    weight, bias = (torch.rand(5, device=route.device) for _ in range(2))
    parts = [[each[first:last] for each in (x, z, dy)] for first, last in ((0, 4), (4, 6), (6, 6))]
    outputs, gradients = [], []
    with _library.implementation(route.implementation):
        for rank, (own, own_z, own_dy) in enumerate(parts):
            others = parts[:rank] + parts[rank + 1 :]
            exchange = Given(*(rank_statistics(each[0], 1) for each in others))
            own_z = own_z if addend else None
            output, channels = forward(own, own_z, Channels(None, None, weight, bias), spec, exchange)
            outputs.append(output)
            given = (channels, spec)
            sums = [_sums_of(*each, *given, addend) for each in others]
            exchange = Given(*sums)
            exchange.averaged_ranks = averaged_ranks
            kept = output if addend else None
            gradients.append(backward(own_dy, own, kept, *given, exchange, wants_z=addend))
    leaves = [each.double().requires_grad_() for each in (x, z, weight, bias)]
    expected = functional.batch_norm(leaves[0], None, None, *leaves[2:], True)
    expected = (expected + leaves[1] if addend else expected + 0 * leaves[1]).relu()
    right = torch.autograd.grad(expected, leaves, dy.double())
    assert_close(torch.cat(outputs), expected)
    dx, dz, dweight, dbias = zip(*gradients, strict=True)
    assert_close(torch.cat(dx), right[0])
    if addend:
        assert_close(torch.cat(dz), right[1])
    for found, whole in ((dweight, right[2]), (dbias, right[3])):
        assert_close(sum(found), whole, reduction=72)
        if averaged_ranks:
            assert_close(found[2], whole / 3, reduction=72)


def _sums_of(x, z, dy, channels, spec, addend):
    output = passes.normalise(x, z, channels, spec) if addend else None
    *_, sum_dy_xhat, sum_dy = passes.local_gradients(dy, x, output, channels, spec, False, False)
    return torch.cat((sum_dy, sum_dy_xhat, sum_dy.new_full((1,), passes.values_per_channel(x, 1))))
