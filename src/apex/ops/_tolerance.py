"""The one table of tolerances per dtype, for tests, `apex doctor` and `apex bench`."""

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
    """Return the relative and absolute tolerance for a result of `dtype` that sums `reduction` terms of order one.

    The sum is of order sqrt(reduction), and so are its rounding errors, while a single result may cancel to zero.
    Therefore the absolute tolerance grows with the root.
    """
    rtol, atol = TOLERANCES[dtype]
    return rtol, atol * math.sqrt(max(1, reduction))


def tensor_core_error(terms: int) -> float:
    """Return the largest error of a sum of `terms` products of order one on tensor cores, which add in float32.

    They add sixteen products at a time to one sum of order sqrt(terms), and truncate instead of rounding: errors of up
    to 2^-23 of the sum, all towards zero. On an H200, 16.8 million sums of 8192 products had errors of up to 5.0e-3, an
    emulation of this way of adding 5.4e-3; this function gives 5.5e-3. Rounding would leave 3.6e-4.
    """
    return terms / 16 * math.sqrt(terms) * 2**-23


def excess(
    actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None, reduction: int = 1, slack: float = 0.0
) -> float:
    """Return the largest error as a multiple of its tolerance: above 1 is wrong, NaN counts as infinitely wrong.

    `slack` is an additional absolute tolerance, for arithmetic that is known to need it.
    """
    if actual.shape != expected.shape:
        return math.inf
    if not actual.numel():
        return 0.0
    rtol, atol = tolerance(dtype or actual.dtype, reduction)
    wanted = expected.double()
    error = (actual.double() - wanted).abs() / (atol + slack + rtol * wanted.abs())
    return math.inf if bool(error.isnan().any()) else float(error.max())


def excess_of_norm(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the error as a multiple of the dtype's relative tolerance.

    Compares whole tensors instead of elements: half-precision intermediates are rounded relative to their own size,
    and an element of the result may be much smaller than these after cancellation.
    """
    error = (actual.double() - expected).norm() / (TOLERANCES[actual.dtype][0] * expected.norm())
    return math.inf if bool(error.isnan()) else float(error)
