"""The one tolerance table: what counts as equal, per dtype, for tests, `apex doctor` and `apex bench`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Relative and absolute tolerance: torch.testing's defaults.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
}


def tolerance(dtype: torch.dtype, reduction: int = 1) -> tuple[float, float]:
    """Relative and absolute tolerance for a result of `dtype` that sums `reduction` terms of order one.

    Such a sum is of order sqrt(reduction), and so are its rounding errors, while a single result may cancel to zero:
    the absolute part grows with the root.
    """
    rtol, atol = TOLERANCES[dtype]
    return rtol, atol * math.sqrt(max(1, reduction))


def excess(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None, reduction: int = 1) -> float:
    """The largest error as a multiple of its tolerance: above 1 is wrong, NaN counts as infinitely wrong."""
    if actual.shape != expected.shape:
        return math.inf
    if not actual.numel():
        return 0.0
    rtol, atol = tolerance(dtype or actual.dtype, reduction)
    wanted = expected.double()
    error = (actual.double() - wanted).abs() / (atol + rtol * wanted.abs())
    return math.inf if bool(error.isnan().any()) else float(error.max())
