"""Launches of the kernel to compile for every GPU: forward and backward, in equal and mixed dtypes, each dtype once."""

from __future__ import annotations

import torch

from apex.ops.multihead.op import launch_dropout_add

_BF16, _F32, _HALF = torch.bfloat16, torch.float32, torch.float16


def record() -> None:
    """Collects (under `record_launches`) the forward and backward launch of each pair of dtypes."""
    seed = torch.empty(1, dtype=torch.int64, device="meta")
    for x_dtype, residual_dtype in ((_BF16, _BF16), (_HALF, _F32)):
        x, residual = (torch.empty(512, 16, 1024, dtype=d, device="meta") for d in (x_dtype, residual_dtype))
        output, kept = launch_dropout_add(x, residual, seed, 0.1, residual_dtype)
        launch_dropout_add(output, None, kept, 0.1, x_dtype)
