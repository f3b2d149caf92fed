"""A quick numeric check of group norm on one device, for `apex doctor`."""

from __future__ import annotations

import torch
from torch import Tensor

from .._tolerance import excess
from . import reference
from .spec import GroupNormSpec

# One shape whose groups are one program's work, one whose are cut into chunks: [N, C, H, W] and groups.
SHAPES = (((2, 60, 5, 7), 6), ((2, 24, 70, 70), 3))


def self_check(device: torch.device) -> float:
    """Largest error, as a multiple of its tolerance, forward and backward, in three dtypes."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape, groups in SHAPES:
            x, dy = (
                torch.randn(shape, generator=generator).to(dtype).to(memory_format=torch.channels_last)
                for _ in range(2)
            )
            weight, bias = (torch.rand(shape[1], generator=generator).add(0.5).to(dtype) for _ in range(2))
            worst = max(worst, _largest_error(x, dy, weight, bias, GroupNormSpec(groups, 1e-5, True), device))
    return worst


def _largest_error(
    x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor, spec: GroupNormSpec, device: torch.device
) -> float:
    from .op import group_norm_backward, group_norm_forward

    there_dy, there_x, there_weight, there_bias = (each.to(device) for each in (dy, x, weight, bias))
    output, statistics = group_norm_forward(there_x, there_weight, there_bias, spec)
    gradients = group_norm_backward(there_dy, there_x, statistics, there_weight, there_bias, spec)
    dy, x, weight, bias = (each.double() for each in (dy, x, weight, bias))
    expected, exact = reference.forward(x, weight, bias, spec)
    expected_gradients = reference.backward(dy, x, exact, weight, bias, spec)
    terms = x.numel() // x.shape[1]
    worst = excess(output.cpu(), expected)
    for actual, wanted, reduction in zip(gradients, expected_gradients, (1, terms, terms), strict=True):
        if actual is not None and wanted is not None:
            worst = max(worst, excess(actual.cpu(), wanted, reduction=reduction))
    return worst
