"""Launches of the gated-linear-unit kernels to compile for every GPU: each kernel and flag, at real and odd sizes."""

from __future__ import annotations

import torch

from apex.ops.glu import op

# rows, columns, dtype, bias dtype, activation
_SHAPES = [
    (16384, 22016, torch.bfloat16, torch.bfloat16, "silu"),
    (16384, 22016, torch.bfloat16, None, "gelu_tanh"),
    (8192, 6000, torch.float16, torch.float16, "silu"),
    (4096, 8190, torch.float16, torch.float32, "gelu"),
    (3, 2, torch.float32, None, "relu"),
]


def record() -> None:
    """Plans and (under `record_launches`) collects forward and backward of every shape."""
    for rows, columns, dtype, bias_dtype, activation in _SHAPES:
        input = torch.empty(rows, columns, dtype=dtype, device="meta")
        bias = None if bias_dtype is None else torch.empty(columns, dtype=bias_dtype, device="meta")
        output = op.launch_forward(input, bias, activation)
        op.launch_backward(output, input, bias, activation, (True, True))
    for dtype, activation in ((torch.bfloat16, "silu"), (torch.float16, "gelu"), (torch.float32, "gelu_tanh")):
        gate = torch.empty(4096, 8192, dtype=dtype, device="meta")
        output = op.launch_pair_forward(gate, gate, activation)
        op.launch_pair_backward(output, gate, gate, activation, (True, True))
