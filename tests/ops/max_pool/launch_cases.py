"""Launches of the max pooling kernels to compile for every GPU: channels that fill blocks and channels that do not."""

from __future__ import annotations

import torch

from apex.ops.max_pool import op

# images, height, width, channels, dtype, window, stride, padding
_CASES = [
    (64, 112, 112, 64, torch.bfloat16, 3, 2, 1),
    (8, 57, 40, 30, torch.float32, 2, 2, 0),
]


def record() -> None:
    """Collects (under `record_launches`) forward and backward of every case."""
    for images, height, width, channels, dtype, *rest in _CASES:
        input = torch.empty(images, height, width, channels, dtype=dtype, device="meta")
        settings = (*rest, height, width)
        output, index = op.launch_forward(input, *settings)
        op.launch_backward(output, index, *settings, [True])
