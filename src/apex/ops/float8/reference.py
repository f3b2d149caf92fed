"""float8 copies of a matrix and their products, in PyTorch's operators.

A float8 copy holds `x * scale`, rounded, where the scale brings the largest magnitude to the largest number of the
format. There is one scale per matrix, or one per row. The products multiply again by the inverse scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _library
from .scales import scales_of


def cast(input: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `input` in float8 and its inverse scale; `amax` has one element, or one for each row as a column."""
    inverse, scale = scales_of(amax, dtype)
    limit = torch.finfo(dtype).max
    return (input.float() * scale).clamp(-limit, limit).to(dtype), inverse


def amax(input: Tensor, by_row: bool) -> Tensor:
    """Return the largest magnitudes as `op.amax` does, float32; zeros for an empty matrix."""
    if not input.numel():
        return input.new_zeros(sum(input.shape) if by_row else 1, dtype=torch.float32)
    magnitudes = input.abs()
    if by_row:
        return torch.cat((magnitudes.amax(1), magnitudes.amax(0))).float()
    return magnitudes.amax().float().reshape(1)


def cast_both(input: Tensor, amax: Tensor, by_row: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return both float8 copies and their inverse scales, as `op.cast_both` does."""
    if not by_row:
        copy, inverse = cast(input, amax.amax(), dtype)
        return copy, copy.t().contiguous(), inverse, inverse.clone()
    rows, columns = amax[:, None].split(list(input.shape))
    copy, inverse = cast(input, rows, dtype)
    transposed, column_inverse = cast(input.t(), columns, dtype)
    return copy, transposed.contiguous(), inverse, column_inverse


def product(left: Tensor, right: Tensor, left_inverse: Tensor, right_inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `left` @ `right`.T of float8 matrices times their inverse scales, computed in float32 and rounded once."""
    with _library.autocast_off(left):
        exact = left.float() @ right.float().t()
    return (exact * left_inverse * right_inverse.reshape(1, -1)).to(dtype)
