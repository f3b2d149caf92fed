"""Launches of the index_mul kernels that no example reaches, to compile for every GPU: second derivatives."""

from __future__ import annotations

import torch

from apex.ops.index_mul import op


def record() -> None:
    """Plan the second derivative, and a first one without the gradient of in2."""
    in1, in2 = (torch.empty(rows, 256, dtype=torch.float32, device="meta") for rows in (200000, 800000))
    index = torch.empty(800000, dtype=torch.int64, device="meta")
    op.launch_backward(in2, in1, in2, index, (True, False))
    op.launch_sums(in2, in1, in2, index, in1, in2, need2=True)
