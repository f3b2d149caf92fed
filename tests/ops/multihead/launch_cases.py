"""Launches of the kernel to compile for every GPU: forward and backward, in equal and mixed dtypes, each dtype once."""

from __future__ import annotations

import torch

from apex.ops.multihead.dropout_add import launch_backward, launch_forward

_BF16, _F32, _HALF = torch.bfloat16, torch.float32, torch.float16


def record() -> None:
    """Plans and (under `recording`) collects the forward and backward launch of each pair of dtypes."""
    seed = torch.empty(1, dtype=torch.int64, device="meta")
    for x_dtype, residual_dtype in ((_BF16, _BF16), (_HALF, _F32)):
        x, residual = (torch.empty(512, 16, 1024, dtype=d, device="meta") for d in (x_dtype, residual_dtype))
        output, kept = launch_forward(x, residual, seed, 0.1)
        launch_backward(output, kept, 0.1, x_dtype)
