"""Launches of the first convolutions of networks to compile for every GPU: large windows and small, few outputs."""

from __future__ import annotations

import torch

from apex.ops.stem_conv import op

# images, height and width with borders, sides of a window, outputs, dtype
_CASES = [
    (64, 229, 230, 7, 8, 64, torch.bfloat16),
    (8, 225, 226, 3, 4, 48, torch.float16),
]


def record() -> None:
    """Collects (under `record_launches`) forward and backward of every case."""
    for images, height, width, *window, outputs, dtype in _CASES:
        input = torch.empty(images, height, width, 4, dtype=dtype, device="meta")
        weight = torch.empty(*window, 4, outputs, dtype=dtype, device="meta")
        op.launch_backward(op.launch_forward(input, weight), input, weight, [False, True])
