"""Scales of float8 copies: they bring the largest magnitude of a matrix or row to the largest number of the format."""

from __future__ import annotations

import torch
from torch import Tensor

# Smallest magnitude that a scale is computed from: zeros and subnormal numbers get a finite scale.
SMALLEST_AMAX = 1e-12


def scales_of(amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the inverse scale and the scale for the largest magnitudes `amax`, in float32."""
    amax = amax.float().clamp(min=SMALLEST_AMAX)
    # Divides tensors, because a quotient of tensors is rounded once. float32 rounds 1 / 448 up, so scales computed with
    # it were too small: all bfloat16 numbers halfway between two float8 numbers went to the smaller one.
    limit = torch.full_like(amax, torch.finfo(dtype).max)
    return amax / limit, limit / amax
