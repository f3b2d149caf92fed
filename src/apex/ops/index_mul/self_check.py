"""A quick numeric check of products with indexed rows on one device, for `apex doctor`."""

from __future__ import annotations

import torch

from .._tolerance import excess
from . import reference

IN1_ROWS, ROWS, COLUMNS = 7, 100, 40


def self_check(device: torch.device) -> float:
    """Largest error, as a multiple of its tolerance, forward and backward, in three dtypes."""
    from .launches import triton_backward
    from .op import FAMILY, _library, index_mul_backward, index_mul_forward

    generator = torch.Generator().manual_seed(0)
    index = torch.randint(IN1_ROWS, (ROWS,), generator=generator)
    worst = 0.0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        in1, in2, grad_out = (
            torch.randn(rows, COLUMNS, generator=generator).to(dtype) for rows in (IN1_ROWS, ROWS, ROWS)
        )
        here = [tensor.to(device) for tensor in (grad_out, in1, in2, index)]
        exact = [grad_out.double(), in1.double(), in2.double(), index]
        worst = max(worst, excess(index_mul_forward(*here[1:]).cpu(), reference.forward(*exact[1:])))
        # The input is small; what a large one takes is checked all the same.
        sorts = _library.runs_triton(FAMILY, here[2])
        found = triton_backward(*here, True)[:2] if sorts else index_mul_backward(*here)
        for actual, expected in zip(found, reference.backward(*exact), strict=True):
            assert actual is not None
            assert expected is not None
            worst = max(worst, excess(actual.cpu(), expected, reduction=ROWS))
    return worst
