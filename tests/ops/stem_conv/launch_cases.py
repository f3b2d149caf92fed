"""Launches of the first convolutions of networks to compile for every GPU: large windows and small, few outputs."""

from __future__ import annotations

import torch

from apex.ops.stem_conv import op

# images, height and width with borders, side of a window, outputs, dtype, stride
_CASES = [
    (64, 230, 230, 8, 64, torch.bfloat16, 2),
    (8, 226, 226, 4, 48, torch.float16, 2),
    (8, 224, 224, 4, 96, torch.bfloat16, 4),
]


def record() -> None:
    """Collects (under `recording`) forward and backward of every case."""
    for images, height, width, side, outputs, dtype, stride in _CASES:
        input = torch.empty(images, height, width, 4, dtype=dtype, device="meta")
        weight = torch.empty(side, side, 4, outputs, dtype=dtype, device="meta")
        op.launch_backward(op.launch_forward(input, weight, stride), input, weight, stride, [False, True])
