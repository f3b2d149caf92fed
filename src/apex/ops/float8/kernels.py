"""Triton kernels of float8 casts: largest magnitudes, and a cast that writes a copy and its transposed copy.

Matrices are contiguous, `rows` x `columns`. Largest magnitudes are stored as the bits of float32 numbers. For numbers
that are not negative, bits sort like the numbers, with NaN above infinity: so NaN and infinity are found too.
"""

import triton
import triton.language as tl

from .._launch import kernel


@triton.jit
def _magnitude(x):
    """Return the bits of |x| in float32."""
    return tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)


@triton.jit
def _scales(bits, LIMIT: tl.constexpr):
    """Return the inverse scale for a largest magnitude, and the scale; NaN for NaN."""
    amax = bits.to(tl.float32, bitcast=True)
    amax = tl.where(amax < 1e-12, 1e-12, amax)
    return tl.div_rn(amax, LIMIT), tl.div_rn(LIMIT, amax)


@triton.jit
def _fit(x, LIMIT: tl.constexpr):
    """Clamp to the largest number of the format, which rounding may exceed; NaN stays NaN."""
    return tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))


@kernel
@triton.jit
def float8_amax(input, partials, elements, programs, BLOCK: tl.constexpr):
    """Compute the largest magnitude of every `programs`-th block; each program has at least one block."""
    program = tl.program_id(0)
    largest = tl.zeros([BLOCK], tl.int32)
    for block in range(program, tl.cdiv(elements, BLOCK), programs):
        index = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, _magnitude(tl.load(input + index, mask=index < elements, other=0.0)))
    tl.store(partials + program, tl.max(largest, 0))


@kernel
@triton.jit
def float8_amax_from_end(input, partials, elements, programs, BLOCK: tl.constexpr):
    """Compute the largest magnitude of every `programs`-th block; 0 for a program without a block.

    Begins with the last block: if `input` was written just before, its end is in the cache. Each thread reduces 8
    elements at once, because maxima of single elements need three times as many registers.
    """
    program = tl.program_id(0)
    largest = tl.zeros([BLOCK // 8], tl.int32)
    last = tl.cdiv(elements, BLOCK) - 1
    offsets = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    for number in range(program, last + 1, programs):
        index = tl.cast(last - number, tl.int64) * BLOCK + offsets
        bits = _magnitude(tl.load(input + index, mask=index < elements, other=0.0))
        largest = tl.maximum(largest, tl.max(bits, 1))
    tl.store(partials + program, tl.max(largest, 0))


@kernel
@triton.jit
def float8_amax_both(input, amax, rows, columns, column_blocks, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute the largest magnitudes of rows and then of columns into `amax`, which is zero before."""
    program = tl.program_id(0)
    row = (program // column_blocks) * ROWS + tl.arange(0, ROWS)
    column = (program % column_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    bits = _magnitude(tl.load(input + row[:, None].to(tl.int64) * columns + column[None, :], mask=mask, other=0.0))
    # A maximum does not depend on the order of its terms: the result has the same bits every time.
    tl.atomic_max(amax + row, tl.max(bits, 1), mask=row < rows, sem="relaxed")
    tl.atomic_max(amax + rows + column, tl.max(bits, 0), mask=column < columns, sem="relaxed")


@kernel
@triton.jit
def float8_cast(
    input, amax, copy, transposed, inverse, column_inverse,
    rows, columns, column_blocks, partials,
    LIMIT: tl.constexpr, BY_ROW: tl.constexpr, PARTIALS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Cast one tile of both copies. Without BY_ROW, all of the at most PARTIALS `partials` give the one scale."""
    program = tl.program_id(0)
    row_block, column_block = program // column_blocks, program % column_blocks
    row = row_block * ROWS + tl.arange(0, ROWS)
    column = column_block * COLUMNS + tl.arange(0, COLUMNS)
    row_mask = None if FULL else row < rows
    column_mask = None if FULL else column < columns
    mask = None if FULL else (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(input + row[:, None].to(tl.int64) * columns + column[None, :], mask=mask).to(tl.float32)
    element = copy.dtype.element_ty
    if BY_ROW:
        row_inverse, scale = _scales(tl.load(amax + row, mask=row_mask), LIMIT)
        turned_inverse, column_scale = _scales(tl.load(amax + rows + column, mask=column_mask), LIMIT)
        if column_block == 0:
            tl.store(inverse + row, row_inverse, mask=row_mask)
        if row_block == 0:
            tl.store(column_inverse + column, turned_inverse, mask=column_mask)
        straight = _fit(x * scale[:, None], LIMIT).to(element)
        turned = _fit(x * column_scale[None, :], LIMIT).to(element)
    else:
        number = tl.arange(0, PARTIALS)
        one_inverse, scale = _scales(tl.max(tl.load(amax + number, mask=number < partials, other=0), 0), LIMIT)
        if program == 0:
            tl.store(inverse, one_inverse)
            tl.store(column_inverse, one_inverse)
        # Loaded twice, so that each copy is rounded separately: from one shared rounding of float32 numbers Triton 3.6
        # writes a quarter of the transposed copy wrongly.
        _, scale_again = _scales(
            tl.max(tl.load(amax + number, mask=number < partials, other=0, volatile=True), 0), LIMIT
        )
        straight = _fit(x * scale, LIMIT).to(element)
        turned = _fit(x * scale_again, LIMIT).to(element)
    tl.store(copy + row[:, None].to(tl.int64) * columns + column[None, :], straight, mask=mask)
    turned_mask = None if FULL else (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(transposed + column[:, None].to(tl.int64) * rows + row[None, :], tl.trans(turned), mask=turned_mask)
