"""Launches of the group norm kernels to compile for every GPU: groups of every size, with every flag."""

from __future__ import annotations

import torch

from apex.ops.group_norm import op

# images, channels, positions, groups, dtype, dtype of the parameters, SiLU
_SHAPES = [
    (2, 320, 64, 32, torch.bfloat16, torch.bfloat16, True),
    (8, 2560, 64, 32, torch.bfloat16, torch.float32, True),
    (2, 320, 4096, 32, torch.bfloat16, torch.bfloat16, True),
    (2, 320, 4095, 32, torch.float32, None, False),
    (8, 2560, 4096, 32, torch.float16, torch.float32, True),
    (8, 2560, 4096, 32, torch.float32, None, False),
    (8, 328, 4096, 8, torch.float16, torch.float16, True),
    (64, 256, 196, 32, torch.float16, torch.float16, False),
]


def record() -> None:
    """Launches forward and backward of every shape, to be called under `record_launches`."""
    for images, channels, positions, groups, dtype, parameters, silu in _SHAPES:
        x = torch.empty(images, positions, channels, dtype=dtype, device="meta").movedim(-1, 1)
        weight = None if parameters is None else torch.empty(channels, dtype=parameters, device="meta")
        x = x if silu else x.contiguous()
        output, statistics = op.launch_forward(x, weight, weight, groups, 1e-5, silu)
        op.launch_backward(output, x, weight, weight, statistics, groups, 1e-5, silu, (True, True, True))
