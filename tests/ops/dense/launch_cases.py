"""Launches of the dense kernels to compile for every GPU: each activation, with and without masks."""

from __future__ import annotations

import torch

from apex.ops.dense import parts, reference

_BF16, _F32, _HALF = torch.bfloat16, torch.float32, torch.float16

# rows, columns, dtype, activation, bias gradient
_ACTIVATIONS = [
    (8192, 16384, _HALF, "gelu", True),
    (8191, 1000, _BF16, "gelu", False),
    (4096, 1024, _BF16, "relu", True),
    (4096, 1000, _F32, "sigmoid", True),
    (100352, 256, _HALF, "relu", True),
    *((8192, 3072, _BF16, activation, True) for activation in reference.ACTIVATIONS[4:]),
]


def record() -> None:
    """Collects (under `record_launches`) the launches."""
    for rows, columns, dtype, activation, bias_grad in _ACTIVATIONS:
        dy = torch.empty(rows, columns, dtype=dtype, device="meta")
        for active in (None, dy) if activation in reference.ACTIVATIONS[3:] else (None,):
            parts.launch_activation_backward(dy, dy, dy, activation, rows, columns, bias_grad, active)
    for rows, columns in ((8192, 16384), (70, 37)):
        for activation in reference.ACTIVATIONS[3:]:
            parts.launch_gelu(torch.empty(rows, columns, dtype=_HALF, device="meta"), activation)
    for rows, outs, ins in ((8192, 4096, 4096), (50, 30, 20)):
        x, dy = (torch.empty(rows, width, dtype=_BF16, device="meta") for width in (ins, outs))
        parts.launch_accumulation(x, dy, torch.empty(outs, ins, device="meta"))
