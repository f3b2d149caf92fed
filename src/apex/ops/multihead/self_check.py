"""A quick numeric check of multihead attention on one device, for `apex doctor`."""

from __future__ import annotations

import torch
from torch import Tensor

from .._tolerance import excess
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
        worst = max(worst, _attention_error(parts, None, device))
        worst = max(worst, _attention_error(parts, hidden, device))
        worst = max(worst, _dropout_error(parts[0], parts[1], device))
    return worst


def _attention_error(parts: list[Tensor], hidden: Tensor | None, device: torch.device) -> float:
    from .op import attend

    mask = None if hidden is None else Mask(MaskKind.PADDING, hidden)
    there = None if hidden is None else Mask(MaskKind.PADDING, hidden.to(device))
    actual = attend(*(part.to(device) for part in parts), HEADS, there, 0.0)
    # Half precision rounds the probabilities too: each of LENGTH terms once more.
    expected = reference.attend(*(part.double() for part in parts), HEADS, SIZE**-0.5, mask)
    return excess(actual.cpu(), expected, reduction=LENGTH)


def _dropout_error(x: Tensor, residual: Tensor, device: torch.device) -> float:
    """Kept elements are scaled, dropped ones leave the residual: each must be one of the two."""
    from .dropout_add import dropout_add

    actual = dropout_add(x.to(device), residual.to(device), DROPOUT).cpu()
    kept = residual.double() + x.double() / (1.0 - DROPOUT)
    dropped = residual.double()
    return min_excess(actual, kept, dropped)


def min_excess(actual: Tensor, *candidates: Tensor) -> float:
    """`excess` against whichever candidate is nearer, element by element."""
    distances = torch.stack([(actual.double() - candidate).abs() for candidate in candidates])
    nearest = torch.stack(candidates).gather(0, distances.argmin(0, keepdim=True))[0]
    return excess(actual, nearest)
