"""A quick numeric check of multihead attention on one device, for `apex doctor`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._tolerance import TOLERANCES
from . import reference
from .masks import Mask, MaskKind

LENGTH, BATCH, HEADS, SIZE, DROPOUT = 40, 3, 4, 16, 0.25


def self_check(device: torch.device) -> float:
    """Largest error, as a multiple of its tolerance, of attention and of dropout with a residual, in three dtypes."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        parts = [torch.randn(LENGTH, BATCH * HEADS, SIZE, generator=generator).to(dtype) for _ in range(3)]
        hidden = torch.rand(BATCH, LENGTH, generator=generator) > 0.7
        errors = (
            _attention_error(parts, None, device),
            _attention_error(parts, hidden, device),
            _dropout_error(parts[0], parts[1], device),
        )
        worst = max(worst, *errors)
    return worst


def excess_of_norm(actual: Tensor, expected: Tensor) -> float:
    """The error's norm as a multiple of what the dtype's relative tolerance allows.

    Of the whole, not element by element: half-precision intermediates are rounded relative to their own size, which an
    element of the result may have lost by cancellation.
    """
    error = (actual.double() - expected).norm() / (TOLERANCES[actual.dtype][0] * expected.norm())
    return math.inf if bool(error.isnan()) else float(error)


def _attention_error(parts: list[Tensor], hidden: Tensor | None, device: torch.device) -> float:
    from .op import attend

    mask = None if hidden is None else Mask(MaskKind.PADDING, hidden)
    there = None if hidden is None else Mask(MaskKind.PADDING, hidden.to(device))
    queries, keys, values = (part.to(device) for part in parts)
    actual = attend(queries, keys, values, HEADS, there, 0.0)
    queries, keys, values = (part.double() for part in parts)
    expected = reference.attend(queries, keys, values, HEADS, SIZE**-0.5, mask)
    return excess_of_norm(actual.cpu(), expected)


def _dropout_error(x: Tensor, residual: Tensor, device: torch.device) -> float:
    """An element is the residual alone or has its full share of x; whichever is nearer is expected."""
    from .dropout_add import dropout_add

    actual = dropout_add(x.to(device), residual.to(device), DROPOUT).cpu()
    dropped = residual.double()
    whole = dropped + x.double() / (1.0 - DROPOUT)
    nearer = (actual.double() - whole).abs() < (actual.double() - dropped).abs()
    return excess_of_norm(actual, torch.where(nearer, whole, dropped))
