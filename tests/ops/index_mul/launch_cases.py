"""Launches of the index_mul kernels to compile for every GPU: each kernel and flag, at real and odd sizes."""

from __future__ import annotations

import torch

from apex.ops.index_mul import op


def record() -> None:
    """Plans and (under `record_launches`) collects forward, backward and its backward of every shape."""
    for in1_rows, count, width, dtype in (
        (200000, 800000, 256, torch.float32),
        (200000, 800000, 200, torch.float16),
        (1000, 50001, 67, torch.float16),
    ):
        in1 = torch.empty(in1_rows, width, dtype=dtype, device="meta")
        in2 = torch.empty(count, width, dtype=dtype, device="meta")
        index = torch.empty(count, dtype=torch.int64, device="meta")
        out = op.launch_forward(in1, in2, index)
        op.launch_backward(out, in1, in2, index, (True, True))
        if dtype == torch.float32:
            op.launch_backward(out, in1, in2, index, (True, False))
            op.launch_sums(out, in1, in2, index, in1, in2, need2=True)
