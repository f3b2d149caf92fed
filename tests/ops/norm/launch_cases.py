"""Launches of the norm kernels to compile for every GPU: each kernel and flag, at sizes that real models use."""

from __future__ import annotations

import torch

from apex.ops.norm import op, residual

_BF16, _F32, _HALF = torch.bfloat16, torch.float32, torch.float16

# rows, columns, dtype, weight dtype, subtract mean, from output
_SHAPES = [
    (1, 1, _F32, _F32, True, False),
    (1, 20000, _F32, _F32, True, False),
    (16384, 64, _BF16, _BF16, True, False),
    (16384, 1000, _HALF, _HALF, True, False),
    (8192, 3000, _HALF, _HALF, False, False),
    (4096, 7000, _F32, _F32, True, False),
    (16384, 1024, _BF16, _BF16, True, False),
    (16384, 1024, _F32, _F32, False, False),
    (16384, 4096, _BF16, _F32, False, True),
    (16384, 4096, _F32, _F32, True, False),
    (8192, 5120, _BF16, _BF16, False, False),
    (8192, 8192, _F32, _F32, True, True),
    (8192, 8192, _BF16, None, False, False),
    (4096, 16384, _BF16, _BF16, True, False),
    (4096, 16384, _F32, _F32, False, False),
    (4096, 12288, _F32, _F32, True, False),
    (4096, 12288, _BF16, _BF16, True, False),
    (4096, 15000, _BF16, _BF16, False, False),
    (4096, 16384, _F32, _F32, True, True),
    (4096, 16384, _BF16, None, True, False),
    (1024, 32768, _BF16, _BF16, True, False),
    (1024, 32768, _F32, _F32, False, True),
    (1024, 32768, _BF16, None, False, False),
]

# rows, columns, dtype, subtract mean, from output: norms that add a residual
_SUMS = [
    (8192, 768, _BF16, True, True),
    (8192, 1024, _BF16, False, True),
    (16384, 4096, _BF16, True, False),
    (4096, 1000, _F32, True, False),
]


def record() -> None:
    """Plans and (under `record_launches`) collects forward and backward of every shape."""
    for rows, columns, dtype, weight_dtype, subtract_mean, from_output in _SHAPES:
        x = torch.empty(rows, columns, dtype=dtype, device="meta")
        weight = None if weight_dtype is None else torch.empty(columns, dtype=weight_dtype, device="meta")
        bias = torch.empty_like(weight) if weight is not None and subtract_mean else None
        settings = (columns, 1e-5, subtract_mean, from_output, dtype, dtype)
        output, statistics = op.launch_forward(x, weight, bias, *settings)
        for param_grads in (True, False):
            wanted = (True, param_grads, param_grads)
            op.launch_backward(output, x, weight, bias, statistics, *settings, wanted)
    mixed = torch.empty(4096, 1024, dtype=_BF16, device="meta")
    op.launch_forward(mixed, torch.empty(1024, device="meta"), None, 1024, 1e-5, False, False, _F32, _BF16)
    for rows, columns, dtype, subtract_mean, from_output in _SUMS:
        x = torch.empty(rows, columns, dtype=dtype, device="meta")
        weight = torch.empty(columns, dtype=dtype, device="meta")
        bias = weight if subtract_mean else None
        settings = (columns, 1e-5, subtract_mean, from_output)
        *_, statistics = residual.launch_forward(x, x, weight, weight, bias, *settings)
        residual.launch_backward(x, x, x, weight, bias, statistics, True, *settings)
