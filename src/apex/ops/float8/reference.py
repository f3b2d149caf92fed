"""float8 copies of a matrix and their products, in PyTorch's operators.

A float8 copy holds `x * scale`, rounded, where the scale brings the largest magnitude to the largest number of the
format. There is one scale per matrix, or one per row. The products multiply again by the inverse scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _library
from .scales import SMALLEST_AMAX, scales_of


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


# Numbers of a row, or rows and columns of a square, that share a scale; then the numbers of a row in MXFP8.
BLOCK, MX_BLOCK = 128, 32


def empty_scales(rows: int, columns: int, square: bool, device: torch.device) -> Tensor:
    """Return memory for the inverse scales of a matrix's blocks, as `blocks` describes it; padding is zero."""
    if not square:
        return torch.empty(columns // BLOCK, rows, dtype=torch.float32, device=device).t()
    width = columns // BLOCK
    padded = -(-width // 4) * 4
    make = torch.empty if padded == width else torch.zeros
    return make(rows // BLOCK, padded, dtype=torch.float32, device=device)[:, :width]


def block_scales(amax: Tensor, dtype: torch.dtype, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """Return the inverse scale and the scale for largest magnitudes; `power_of_2` rounds the inverse up to a power."""
    inverse, scale = scales_of(amax, dtype)
    if not power_of_2:
        return amax.clamp(min=SMALLEST_AMAX) * (1 / torch.finfo(dtype).max), scale
    # Adding all ones to the mantissa carries into the exponent unless the mantissa is zero.
    power = ((inverse.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    inverse = torch.where(inverse < torch.inf, power, inverse)
    return inverse, inverse.reciprocal()


def cast_blocks(input: Tensor, square: bool, power_of_2: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return both float8 copies and the inverse scales of their blocks, as `blocks.cast_blocks` does."""
    straight, inverse = _cast_one(input, square, power_of_2, dtype)
    turned, turned_inverse = _cast_one(input.t().contiguous(), square, power_of_2, dtype)
    return straight, turned, inverse, turned_inverse


def _cast_one(input: Tensor, square: bool, power_of_2: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = input.shape
    tiles, inverse = _cast_tiles(input, BLOCK if square else 1, BLOCK, power_of_2, dtype)
    return tiles.view(rows, columns), empty_scales(rows, columns, square, input.device).copy_(inverse)


def _cast_tiles(input: Tensor, height: int, width: int, power_of_2: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a float8 copy as [tile rows, height, tile columns, width], and an inverse scale for each tile."""
    rows, columns = input.shape
    tiles = input.float().reshape(rows // height, height, columns // width, width)
    inverse, scale = block_scales(tiles.abs().amax((1, 3)), dtype, power_of_2)
    limit = torch.finfo(dtype).max
    return (tiles * scale[:, None, :, None]).clamp(-limit, limit).to(dtype), inverse


def mx_rounded(input: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the MXFP8 numbers nearest to a matrix's, in bfloat16, which holds them exactly.

    Each 32 numbers of a row share a scale, the smallest power of two with which they do not exceed the format.
    """
    tiles, inverse = _cast_tiles(input, 1, MX_BLOCK, True, dtype)
    return (tiles.float() * inverse[:, None, :, None]).view(input.shape).bfloat16()


def mx_product(left: Tensor, right: Tensor, number: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Return `left` @ `right`.T of matrices rounded to MXFP8, computed in float32 and rounded once.

    `number` is the format of `left`. `right` is e4m3.
    """
    with _library.autocast_off(left):
        exact = mx_rounded(left, number).float() @ mx_rounded(right, torch.float8_e4m3fn).float().t()
        return exact.to(dtype)


def widened_blocks(copy: Tensor, inverse: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers that a float8 copy with inverse scales of its blocks represents."""
    if not copy.numel():
        return copy.to(dtype)
    rows, columns = copy.shape
    height = rows // inverse.shape[0]
    tiles = copy.to(dtype).view(rows // height, height, columns // BLOCK, BLOCK) * inverse.to(dtype)[:, None, :, None]
    return tiles.view(rows, columns)


def block_product(
    left: Tensor, right: Tensor, left_inverse: Tensor, right_inverse: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return `left` @ `right`.T of float8 matrices with inverse scales of blocks, in float32 and rounded once."""
    with _library.autocast_off(left):
        return (widened_blocks(left, left_inverse) @ widened_blocks(right, right_inverse).t()).to(dtype)
