"""Comparison of results with the float64 reference, so that no wrong result gets a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ..ops._tolerance import excess, tolerance
from .registry import Expected


def worst_excess(actual: Sequence[Tensor], expected: Sequence[Expected]) -> float:
    """Return the largest error of any element as a multiple of its tolerance; ours must be at most 1."""
    if len(actual) != len(expected):
        return math.inf
    return max(
        (excess(a.detach(), e.value, e.dtype, e.reduction, e.slack) for a, e in zip(actual, expected, strict=True)),
        default=0.0,
    )


def mean_excess(actual: Sequence[Tensor], expected: Sequence[Expected]) -> float:
    """Return the root-mean-square error of the worst tensor as a multiple of its tolerance; a peer's must be at most 1.

    A peer may round an intermediate to half precision, which puts single elements that cancel to nearly zero outside
    the tolerance. This is not a wrong result and must not keep the peer's time out of the comparison.
    """
    if len(actual) != len(expected):
        return math.inf
    return max((_mean_excess(a.detach(), e) for a, e in zip(actual, expected, strict=True)), default=0.0)


def _mean_excess(actual: Tensor, expected: Expected) -> float:
    if actual.shape != expected.value.shape:
        return math.inf
    if not actual.numel():
        return 0.0
    rtol, atol = tolerance(expected.dtype, expected.reduction)
    error = (actual.double() - expected.value).square().mean().sqrt()
    size = expected.value.square().mean().sqrt()
    ratio = float(error / (atol + expected.slack + rtol * size))
    return math.inf if math.isnan(ratio) else ratio
