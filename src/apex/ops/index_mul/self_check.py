"""A quick numeric check of products with indexed rows on one device, for `apex doctor`."""

from __future__ import annotations

import torch

from .._tolerance import excess
from . import reference

IN1_ROWS, ROWS, COLUMNS = 7, 100, 40


def self_check(device: torch.device) -> float:
    """Largest error, as a multiple of its tolerance, forward and backward, in three dtypes."""
    from .op import index_mul_backward, index_mul_forward

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
        for actual, expected in zip(index_mul_backward(*here), reference.backward(*exact), strict=True):
            assert actual is not None
            assert expected is not None
            worst = max(worst, excess(actual.cpu(), expected, reduction=ROWS))
    return worst
