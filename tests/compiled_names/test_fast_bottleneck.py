"""fast_bottleneck: all 22 functions, whole and as stages of two ranks played by one process, against the module."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fast_bottleneck as fast
from tests.contrib.spatial.problem import Case, block, images, trained

CASES = [
    Case(stride, out, *layout, torch.float64, 1)
    for stride, out in ((1, 4), (2, 6))
    for layout in ((False, False), (False, True), (True, False))
]


def lists(case: Case, x: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Arguments of the forward stages, and weights and scales by number."""
    module = block(case)
    weights = [weight.detach() for weight in module.w_conv]
    pairs = [norm.get_scale_bias(case.explicit_nhwc) for norm in module._norms()]
    scales, biases = ([pair[place] for pair in pairs] for place in range(2))
    inputs = [x, *weights[:3], *scales[:3], *biases[:3]]
    return inputs + [each[3] for each in (weights, scales, biases) if len(each) > 3], weights, scales


def backward_lists(inputs: list[Tensor], weights: list[Tensor], scales: list[Tensor], outputs: list[Tensor]) -> list:
    y = outputs[2]
    dy = torch.arange(y.numel(), dtype=y.dtype).sin().view(y.shape) * (y > 0)
    last = dy * scales[3] if len(weights) > 3 else dy
    return [*inputs[:10], dy * scales[2], last, *outputs[:2], *weights[3:]]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_whole(case: Case) -> None:
    x = images(case, 6)
    inputs, weights, scales = lists(case, x)
    outputs = fast.forward(case.explicit_nhwc, case.stride, inputs)
    gradients = fast.backward(case.explicit_nhwc, case.stride, backward_lists(inputs, weights, scales, outputs))
    for actual, expected in zip([outputs[2], *gradients], trained(block(case), x), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("method", ["recompute", "pad", "correct"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_stages_of_two_ranks(case: Case, method: str) -> None:
    """The upper and the lower half, each with the row of the other; every function but the two above is called."""
    nhwc, stride = case.explicit_nhwc, case.stride
    dim = 1 if nhwc else 2
    x = images(case, 12)
    whole_inputs, weights, scales = lists(case, x)
    whole = fast.forward(nhwc, stride, whole_inputs)
    whole_back = backward_lists(whole_inputs, weights, scales, whole)
    expected = fast.backward(nhwc, stride, whole_back)

    halves = [[each, *whole_inputs[1:]] for each in x.chunk(2, dim)]
    outputs = [fast.forward_init(nhwc, stride, inputs) for inputs in halves]
    for inputs, results in zip(halves, outputs, strict=True):
        fast.forward_out1(nhwc, stride, inputs, results)
    rows = outputs[0][0].shape[dim]
    edges = [rows - 1, 0]  # the row next to the other rank
    thresholds = [torch.tensor([[0], [rows - 2]]), torch.tensor([[1], [rows - 1]])]
    w2 = weights[1]

    def row(tensor: Tensor, place: int, count: int = 1) -> Tensor:
        return tensor.narrow(dim, place, count)

    def padded(mine: Tensor, other: Tensor, rank: int) -> Tensor:
        zero = torch.zeros_like(row(mine, 0))
        return torch.cat([zero, mine, row(other, 0)] if rank == 0 else [row(other, rows - 1), mine, zero], dim)

    pads = [padded(outputs[rank][0], outputs[1 - rank][0], rank) for rank in range(2)]
    for rank, (inputs, results) in enumerate(zip(halves, outputs, strict=True)):
        arguments = (nhwc, stride, inputs, results)
        edge, fat = row(results[1], edges[rank]), row(pads[rank], edges[rank], 3)
        if method == "pad":
            fast.forward_out2_pad(*arguments, pads[rank])
        elif method == "recompute":
            fast.forward_out2(*arguments)
            edge.copy_(fast.forward_out2_halo(nhwc, fat, inputs))
        else:
            fast.forward_out2_mask(*arguments, *thresholds[rank])
            halo, weight = row(pads[rank], rows + 1 if rank == 0 else 0), row(w2, 2 if rank == 0 else 0)
            edge.copy_(fast.forward_out2_halo_corr(nhwc, halo, inputs, weight, edge.clone()))
        fast.forward_rest(*arguments)
        torch.testing.assert_close(results[2], whole[2].chunk(2, dim)[rank])

    lows = [[each.chunk(2, dim)[rank] for each in whole_back[10:14]] for rank in range(2)]
    backs = [[*halves[rank][:10], *lows[rank], *weights[3:]] for rank in range(2)]
    gradients = [fast.backward_init(nhwc, stride, each) for each in backs]
    behind = [fast.backward_grad_out2(nhwc, stride, backs[rank], gradients[rank]) for rank in range(2)]
    for rank, (inputs, results) in enumerate(zip(backs, gradients, strict=True)):
        arguments = (nhwc, stride, inputs, results)
        pad, out1 = padded(behind[rank], behind[1 - rank], rank), inputs[12]
        if method == "correct":
            grad_out1 = fast.backward_grad_out1_mask(*arguments, behind[rank], *thresholds[rank])
            halo, weight = row(pad, rows + 1 if rank == 0 else 0), row(w2, 0 if rank == 0 else 2)
            edge = row(grad_out1, edges[rank])
            at_edge = row(out1, edges[rank])
            done = fast.backward_grad_out1_halo_corr(nhwc, stride, inputs, weight, results, halo, at_edge, edge.clone())
        else:
            grad_out1 = fast.backward_grad_out1(*arguments, behind[rank])
            edge = row(grad_out1, edges[rank])
            fat_out1 = row(padded(out1, torch.zeros_like(out1), rank), edges[rank], 3)
            done = row(fast.backward_grad_out1_halo(*arguments, row(pad, edges[rank], 3), fat_out1), 1)
        edge.copy_(done)
        fast.backward_wgrad3(*arguments)
        if method == "recompute":  # the inner rows, and then what the edge adds
            inner = behind[rank].clone()
            row(inner, edges[rank]).zero_()
            fast.backward_wgrad2(*arguments, inner)
            fat = row(pads[rank], edges[rank], 3)
            results[2] += fast.backward_wgrad2_halo(*arguments, fat, row(behind[rank], edges[rank]))
        else:
            fast.backward_wgrad2_pad(*arguments, pads[rank], behind[rank])
        fast.backward_wgrad1(*arguments, grad_out1)
        fast.backward_rest(*arguments, behind[rank], grad_out1)
        torch.testing.assert_close(results[0], expected[0].chunk(2, dim)[rank])
    for first, second, both in zip(*(each[1:] for each in gradients), expected[1:], strict=True):
        torch.testing.assert_close(first + second, both)
