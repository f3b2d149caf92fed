"""A quick numeric check of what follows a convolution on one device, for `apex doctor`."""

from __future__ import annotations

import torch

from .._tolerance import excess


def self_check(device: torch.device) -> float:
    """Largest error, as a multiple of its tolerance, of scale, bias, ReLU and mask in three dtypes."""
    from .op import _epilogue

    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = torch.randn(2, 24, 7, 9, generator=generator).to(dtype).to(memory_format=torch.channels_last)
        scale, bias = (torch.rand(24, generator=generator).to(dtype) for _ in range(2))
        mask = (torch.rand(values.shape, generator=generator) > 0.3).to(memory_format=torch.channels_last)
        there = [each.to(device) for each in (values, scale, bias, mask)]
        exact = values.double() * scale.double()[:, None, None] + bias.double()[:, None, None]
        worst = max(worst, excess(_epilogue(*there).cpu(), exact.relu() * mask))
    return worst
