"""syncbn, called as upstream's Python code calls it."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import syncbn
from apex.ops import _library
from tests.support.harness import Route, assert_close, routes

ROWS, CHANNELS = (3, 1), 6


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_two_processes_worth_of_calls(route: Route, dtype: torch.dtype, last: bool, has_weight: bool) -> None:
    """The steps of upstream's SyncBatchnormFunction, with both processes here."""
    suffix = "_c_last" if last else ""

    def tensor() -> Tensor:
        made = torch.randn(sum(ROWS), CHANNELS, 5, 7, device=route.device).to(dtype)
        return made.movedim(1, -1).contiguous() if last else made

    x, z, dy = tensor(), tensor(), tensor()
    weight, bias = (torch.rand(CHANNELS, device=route.device) + 0.5 for _ in range(2)) if has_weight else (None, None)
    parts, gradients = x.split(ROWS), []
    with _library.implementation(route.implementation):
        found = [getattr(syncbn, f"welford_mean_var{suffix}")(part) for part in parts]
        assert all(each.dtype == torch.float32 for pair in found for each in pair)
        means, variances = (torch.stack(each) for each in zip(*found, strict=True))
        counts = torch.tensor([part.numel() // CHANNELS for part in parts], device=route.device, dtype=torch.int32)
        mean, variance, inverse = syncbn.welford_parallel(means, variances, counts, 1e-5)
        common = (mean, inverse, weight)
        if last:
            output = torch.cat(
                [
                    syncbn.batchnorm_forward_c_last(part, own, *common, bias, True)
                    for part, own in zip(parts, z.split(ROWS), strict=True)
                ]
            )
            dy = syncbn.relu_bw_c_last(dy, x, z, *common, bias)
        else:
            output = torch.cat([syncbn.batchnorm_forward(part, *common, bias) for part in parts])
        reduced = [
            getattr(syncbn, f"reduce_bn{suffix}")(own, part, *common)
            for part, own in zip(parts, dy.split(ROWS), strict=True)
        ]
        sums = [sum(each) for each in zip(*(four[:2] for four in reduced), strict=True)]
        gradients = torch.cat(
            [
                getattr(syncbn, f"batchnorm_backward{suffix}")(own, part, *common, *sums, counts)
                for part, own in zip(parts, dy.split(ROWS), strict=True)
            ]
        )
    wide = x.double().requires_grad_()
    parameters = [each.double().requires_grad_() for each in (weight, bias) if each is not None]
    first = wide.movedim(-1, 1) if last else wide
    dimensions = (0, 2, 3)
    assert_close(mean, first.mean(dimensions), reduction=140)
    assert_close(variance, first.var(dimensions), reduction=140)
    assert_close(inverse, (first.var(dimensions, correction=0) + 1e-5).rsqrt(), reduction=140)
    expected = functional.batch_norm(first, None, None, *parameters, training=True)
    expected = expected.movedim(1, -1) if last else expected
    if last:
        expected = (expected + z.double()).relu()
        assert torch.equal(dy != 0, output > 0)
    assert_close(output, expected, reduction=4)
    before = (
        expected if not last else functional.batch_norm(first, None, None, *parameters, training=True).movedim(1, -1)
    )
    wanted = torch.autograd.grad(before, [wide, *parameters], dy.double())
    assert_close(gradients, wanted[0], reduction=140)
    assert gradients.dtype == dtype
    centred = dy.double() * (wide - (mean if last else mean[:, None, None]))
    every = (0, 1, 2) if last else dimensions
    assert_close(sums[0], dy.double().sum(every), reduction=140)
    assert_close(sums[1], centred.sum(every), reduction=140)
    for position, parameter in enumerate(wanted[1:], 2):
        assert_close(sum(four[position] for four in reduced), parameter, reduction=140)
    if not has_weight:
        assert all(four[2].numel() == four[3].numel() == 0 for four in reduced)
