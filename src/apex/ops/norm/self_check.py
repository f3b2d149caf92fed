"""A quick numeric check of the norms on one device, for `apex doctor`."""

from __future__ import annotations

import torch

from .._tolerance import excess
from . import reference

ROWS, COLUMNS, EPS = 48, 1000, 1e-5


def self_check(device: torch.device) -> float:
    """Largest error, as a multiple of its tolerance, of both norms, forward and backward, in three dtypes."""
    from .op import norm_backward, norm_forward

    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, dy = (torch.randn(ROWS, COLUMNS, generator=generator).to(dtype) for _ in range(2))
        weight, bias = (torch.rand(COLUMNS, generator=generator).add(0.5).to(dtype) for _ in range(2))
        for subtract_mean in (True, False):
            b = bias if subtract_mean else None
            arguments = (COLUMNS, EPS, subtract_mean)
            exact = [None if t is None else t.double() for t in (x, weight, b)]
            expected = reference.forward(*exact, *arguments, torch.float64)
            gradients = reference.backward(
                dy.double(), exact[0], *expected[1:], *exact[1:], *arguments, False, torch.float64
            )
            here = [None if t is None else t.to(device) for t in (x, weight, b)]
            output, mean, rstd = norm_forward(*here, *arguments, dtype)
            actual = norm_backward(dy.to(device), here[0], mean, rstd, *here[1:], *arguments, False, dtype)
            worst = max(worst, excess(output.cpu(), expected[0]))
            for gradient, wanted, reduction in zip(actual, gradients, (1, ROWS, ROWS), strict=True):
                if gradient is not None:
                    worst = max(worst, excess(gradient.cpu(), wanted, reduction=reduction))
    return worst
