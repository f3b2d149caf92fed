"""Triton kernels of float8 matrices with a scale per block: the cast to both copies, and the product of such copies.

Sizes are multiples of 128, the block size.
"""

import triton
import triton.language as tl

from .._launch import kernel

BLOCK = tl.constexpr(128)


@triton.jit
def _larger(a, b):
    """Return the larger number; NaN if one is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _block_scales(amax, LIMIT: tl.constexpr, POWER_OF_2: tl.constexpr):
    """Return the inverse scale for a largest magnitude, and the scale; NaN for NaN.

    `POWER_OF_2` rounds the inverse scale up to a power of two, so that no number exceeds the format.
    """
    amax = tl.where(amax < 1e-12, 1e-12, amax)
    if POWER_OF_2:
        exact = tl.div_rn(amax, LIMIT)
        # Adding all ones to the mantissa carries into the exponent unless the mantissa is zero.
        power = ((exact.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        inverse = tl.where(exact < float("inf"), power, exact)
        return inverse, tl.div_rn(1.0, inverse)
    # One division instead of two: programs of `float8_cast_blocks` divide once for some 10 numbers.
    return amax * (1.0 / LIMIT), tl.div_rn(LIMIT, amax)


@triton.jit
def _cast_rows(x, copy, inverse, LIMIT: tl.constexpr, POWER_OF_2: tl.constexpr):
    """Write rows of a tile to the addresses `copy`, with a scale for each row, and the inverse scales to `inverse`."""
    row_inverse, scale = _block_scales(tl.reduce(tl.abs(x), 1, _larger), LIMIT, POWER_OF_2)
    tl.store(inverse, row_inverse)
    tl.store(copy, (x * scale[:, None]).to(copy.dtype.element_ty))


@kernel
@triton.jit
def float8_cast_blocks(
    input, copy, transposed, inverse, turned_inverse,
    rows, columns, padded, turned_padded,
    LIMIT: tl.constexpr, SQUARE: tl.constexpr, POWER_OF_2: tl.constexpr,
):  # fmt: skip
    """Cast a tile of 128 x 128 numbers, for the copy and for the transposed copy.

    With `SQUARE` the tile has one scale, at [tile row, tile column] of `inverse`, whose rows have `padded` elements.
    Otherwise each row of a copy's tile has a scale, at [tile column, row]; this holds for the transposed copy too.

    `x0` has the rows 0, 4, 8, ... of the tile, `x1` the rows 1, 5, 9, ... So four neighbours of a row of the transposed
    copy are in one thread, which exchanges them as one word instead of four bytes. No number is clamped: times its
    scale it is at most LIMIT (1 + 2^-23), which is rounded to LIMIT.
    """
    row_block, column_block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    tile = input + (row_block * columns + column_block) * BLOCK
    copy_tile = copy + (row_block * columns + column_block) * BLOCK
    transposed_tile = transposed + (column_block * rows + row_block) * BLOCK
    element = copy.dtype.element_ty
    quarter, whole = tl.arange(0, BLOCK // 4), tl.arange(0, BLOCK)
    offset = quarter[:, None] * (4 * columns) + whole[None, :]
    x0 = tl.load(tile + offset).to(tl.float32)
    x1 = tl.load(tile + columns + offset).to(tl.float32)
    x2 = tl.load(tile + 2 * columns + offset).to(tl.float32)
    x3 = tl.load(tile + 3 * columns + offset).to(tl.float32)
    most = _larger(_larger(tl.abs(x0), tl.abs(x1)), _larger(tl.abs(x2), tl.abs(x3)))
    if SQUARE:
        one_inverse, scale = _block_scales(
            tl.reduce(tl.reduce(most, 1, _larger), 0, _larger), LIMIT, POWER_OF_2
        )  # fmt: skip
        tl.store(inverse + row_block * padded + column_block, one_inverse)
        tl.store(turned_inverse + column_block * turned_padded + row_block, one_inverse)
        tl.store(copy_tile + offset, (x0 * scale).to(element))
        tl.store(copy_tile + columns + offset, (x1 * scale).to(element))
        tl.store(copy_tile + 2 * columns + offset, (x2 * scale).to(element))
        tl.store(copy_tile + 3 * columns + offset, (x3 * scale).to(element))
    else:
        row_inverse = inverse + column_block * rows + row_block * BLOCK + 4 * quarter
        _cast_rows(x0, copy_tile + offset, row_inverse, LIMIT, POWER_OF_2)
        _cast_rows(x1, copy_tile + columns + offset, row_inverse + 1, LIMIT, POWER_OF_2)
        _cast_rows(x2, copy_tile + 2 * columns + offset, row_inverse + 2, LIMIT, POWER_OF_2)
        _cast_rows(x3, copy_tile + 3 * columns + offset, row_inverse + 3, LIMIT, POWER_OF_2)
        column_inverse, column_scale = _block_scales(tl.reduce(most, 0, _larger), LIMIT, POWER_OF_2)
        tl.store(turned_inverse + row_block * columns + column_block * BLOCK + whole, column_inverse)
        scale = column_scale[None, :]
    rows_in_order = tl.join(tl.join(x0 * scale, x2 * scale), tl.join(x1 * scale, x3 * scale))
    turned = tl.reshape(tl.permute(rows_in_order, (1, 0, 2, 3)), (BLOCK, BLOCK)).to(element)
    tl.store(transposed_tile + whole[:, None] * rows + whole[None, :], turned)


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
