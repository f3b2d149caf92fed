"""float8 copies of a matrix and products of them, in PyTorch's operators.

A float8 copy holds `x * scale`, rounded, where the scale brings the largest magnitude to the largest number of the
format. There is one scale per matrix, or one per row. The products multiply again by the inverse scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _library

# A matrix of zeros, or of subnormal numbers, gets a finite scale.
SMALLEST_AMAX = 1e-12


def scales_of(amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The inverse scale and the scale for the largest magnitudes `amax`, in float32."""
    amax = amax.float().clamp(min=SMALLEST_AMAX)
    # Quotients of tensors, because those are rounded once. With 1 / 448, which float32 has as a larger number, scales
    # come out too small: numbers of bfloat16 that are halfway between two of float8 all went to the smaller one.
    limit = torch.full_like(amax, torch.finfo(dtype).max)
    return amax / limit, limit / amax


def cast(input: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`input` in float8 and its inverse scale; `amax` has one element, or one for each row as a column."""
    inverse, scale = scales_of(amax, dtype)
    limit = torch.finfo(dtype).max
    return (input.float() * scale).clamp(-limit, limit).to(dtype), inverse


def amax(input: Tensor, by_row: bool) -> Tensor:
    """See `op.amax`."""
    magnitudes = input.abs()
    if by_row:
        return torch.cat((magnitudes.amax(1), magnitudes.amax(0))).float()
    return magnitudes.amax().float().reshape(1)


def cast_both(input: Tensor, amax: Tensor, by_row: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """See `op.cast_both`."""
    if not by_row:
        copy, inverse = cast(input, amax.amax(), dtype)
        return copy, copy.t().contiguous(), inverse, inverse.clone()
    rows, columns = amax[:, None].split(list(input.shape))
    copy, inverse = cast(input, rows, dtype)
    transposed, column_inverse = cast(input.t(), columns, dtype)
    return copy, transposed.contiguous(), inverse, column_inverse


def product(left: Tensor, right: Tensor, left_inverse: Tensor, right_inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """`left` @ `right`.T of float8 matrices, multiplied by their inverse scales: products in float32, rounded once."""
    with _library.autocast_off(left):
        exact = left.float() @ right.float().t()
    return (exact * left_inverse * right_inverse.reshape(1, -1)).to(dtype)
