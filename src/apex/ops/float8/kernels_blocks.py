"""Triton kernels of float8 matrices with a scale per block: the cast to both copies, and the product of such copies.

Sizes are multiples of 128, the block size. Largest magnitudes are the bits of float32 numbers, as in `kernels`.
"""

import triton
import triton.language as tl

from .._launch import kernel
from .kernels import _magnitude

BLOCK = tl.constexpr(128)


@triton.jit
def _block_scales(bits, LIMIT: tl.constexpr, POWER_OF_2: tl.constexpr):
    """Return the inverse scale for a largest magnitude, and the scale; NaN for NaN.

    `POWER_OF_2` rounds the inverse scale up to a power of two, so that no number exceeds the format.
    """
    amax = bits.to(tl.float32, bitcast=True)
    amax = tl.where(amax < 1e-12, 1e-12, amax)
    if POWER_OF_2:
        exact = tl.div_rn(amax, LIMIT)
        # Adding all ones to the mantissa carries into the exponent unless the mantissa is zero.
        power = ((exact.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        inverse = tl.where(exact < float("inf"), power, exact)
        return inverse, tl.div_rn(1.0, inverse)
    # One division instead of two: programs of `float8_cast_blocks` divide once for some 10 numbers.
    return amax * (1.0 / LIMIT), tl.div_rn(LIMIT, amax)


@kernel
@triton.jit
def float8_cast_blocks(
    input, copy, transposed, inverse, turned_inverse,
    rows, columns, padded, turned_padded,
    LIMIT: tl.constexpr, SQUARE: tl.constexpr, POWER_OF_2: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Cast a tile of 128 x 128 numbers, for the copy and for the transposed copy.

    With `SQUARE` the tile has one scale, at [tile row, tile column] of `inverse`, whose rows have `padded` elements.
    Otherwise each row of a copy's tile has a scale, at [tile column, row]; this holds for the transposed copy too.

    The tile is read from the cache again for the transposed copy, `SLICE` rows or columns at a time: a whole tile in
    registers leaves room for one program on a multiprocessor. No number is clamped: times its scale it is at most
    LIMIT (1 + 2^-23), which is rounded to LIMIT.
    """
    row_block, column_block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    tile = input + (row_block * columns + column_block) * BLOCK
    copy_tile = copy + (row_block * columns + column_block) * BLOCK
    transposed_tile = transposed + (column_block * rows + row_block) * BLOCK
    element = copy.dtype.element_ty
    whole = tl.arange(0, BLOCK)
    if SQUARE:
        bits = _magnitude(tl.load(tile + whole[:, None] * columns + whole[None, :]))
        one_inverse, scale = _block_scales(tl.max(tl.max(bits, 1), 0), LIMIT, POWER_OF_2)
        tl.store(inverse + row_block * padded + column_block, one_inverse)
        tl.store(turned_inverse + column_block * turned_padded + row_block, one_inverse)
    for start in range(0, BLOCK, SLICE):
        part = start + tl.arange(0, SLICE)
        place = part[:, None] * columns + whole[None, :]
        x = tl.load(tile + place).to(tl.float32)
        if SQUARE:
            scaled = x * scale
        else:
            row_inverse, row_scale = _block_scales(tl.max(_magnitude(x), 1), LIMIT, POWER_OF_2)
            tl.store(inverse + column_block * rows + row_block * BLOCK + part, row_inverse)
            scaled = x * row_scale[:, None]
        tl.store(copy_tile + place, scaled.to(element))
    for start in range(0, BLOCK, SLICE):
        part = start + tl.arange(0, SLICE)
        x = tl.load(tile + whole[:, None] * columns + part[None, :]).to(tl.float32)
        if SQUARE:
            scaled = x * scale
        else:
            column_inverse, column_scale = _block_scales(tl.max(_magnitude(x), 0), LIMIT, POWER_OF_2)
            tl.store(turned_inverse + row_block * columns + column_block * BLOCK + part, column_inverse)
            scaled = x * column_scale[None, :]
        tl.store(transposed_tile + part[:, None] * rows + whole[None, :], tl.trans(scaled.to(element)))


@kernel
@triton.jit
def float8_block_product(
    left, right, left_inverse, right_inverse, output,
    rows, columns, inner, padded,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    """Compute `left` [rows, inner] @ `right` [columns, inner].T; each slice of 128 products has its scales.

    Slices are added up in float32, because the tensor cores of Hopper keep 14 bits. `left` has one scale for each row
    of a slice. `right` has one for each row too or, with `SQUARE`, one for each 128 rows. Programs go through the
    output in groups of `GROUP` tile rows, so that programs at the same time share tiles.
    """
    program = tl.program_id(0)
    row_blocks, column_blocks = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    first = (program // (GROUP * column_blocks)) * GROUP
    height = tl.minimum(row_blocks - first, GROUP)
    within = program % (GROUP * column_blocks)
    row = (first + within % height) * ROWS + tl.arange(0, ROWS)
    column = (within // height) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, BLOCK)
    left_place = left + row[:, None].to(tl.int64) * inner + depth[None, :]
    right_place = right + column[None, :].to(tl.int64) * inner + depth[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(tl.cdiv(inner, BLOCK)):
        product = tl.dot(tl.load(left_place), tl.load(right_place), out_dtype=tl.float32)
        row_scale = tl.load(left_inverse + tl.cast(block, tl.int64) * rows + row)
        if SQUARE:
            column_scale = tl.load(right_inverse + (column // BLOCK) * padded + block)
        else:
            column_scale = tl.load(right_inverse + tl.cast(block, tl.int64) * columns + column)
        total += product * row_scale[:, None] * column_scale[None, :]
        left_place += BLOCK
        right_place += BLOCK
    pointers = output + row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(pointers, total.to(output.dtype.element_ty))
