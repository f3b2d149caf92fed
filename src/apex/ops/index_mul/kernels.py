"""Triton kernels of products with indexed rows: out[i] = in1[index[i]] * in2[i], and its derivatives.

Matrices are contiguous, `width` elements to a row; arithmetic is float32. The gradient of `in1` sums the rows that have
the same index, without atomics: positions are sorted by index first (`keys` are the sorted indices, `order` the
positions they come from, `offsets` where each row of in1 begins among them) and cut into chunks of STEPS positions.
Each chunk sums the rows of equal index. A row of in1 whose positions lie in several chunks has partial sums, which
`index_mul_finish` adds. An index out of range gives rows of NaN and adds to nothing. ALIGN, a power of two up to 16,
divides `width`: dividing and multiplying by ALIGN tells Triton how wide loads may be.
"""

import triton
import triton.language as tl

from .._launch import kernel


@kernel
@triton.jit
def index_mul_forward(
    in1, in2, index, out,
    count, in1_rows, width, column_blocks,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Compute a tile of ROWS x BLOCK per program. FULL: no row or column needs a mask."""
    width = width // ALIGN * ALIGN
    program = tl.program_id(0)
    row = (program // column_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (program % column_blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = None if FULL else (row < count)[:, None] & (column < width)[None, :]
    source = tl.load(index + row, mask=None if FULL else row < count).to(tl.int64)
    known = (source >= 0) & (source < in1_rows)
    known = known[:, None] if FULL else known[:, None] & mask
    offset = row[:, None] * width + column[None, :]
    first = tl.load(in1 + source[:, None] * width + column[None, :], mask=known, other=float("nan")).to(tl.float32)
    second = tl.load(in2 + offset, mask=mask).to(tl.float32)
    tl.store(out + offset, (first * second).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _flush(total, current, ended, first, end, chunk, offsets, grad1, partials, column, column_mask, width):
    """Store the sums of rows of in1 that have `ended`: complete ones as gradients, others as partial sums.

    A chunk has two slots for partial sums: one for the row it began with, one for the row it ended with.
    """
    begin = tl.load(offsets + current, mask=ended, other=0)
    stop = tl.load(offsets + current + 1, mask=ended, other=0)
    whole = (begin >= first) & (stop <= end)
    pointers = grad1 + current.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(pointers, total.to(grad1.dtype.element_ty), mask=(ended & whole)[:, None] & column_mask)
    slot = 2 * chunk.to(tl.int64) + (begin >= first).to(tl.int64)
    pointers = partials + slot[:, None] * width + column[None, :]
    tl.store(pointers, total, mask=(ended & (whole == 0))[:, None] & column_mask)


@kernel
@triton.jit
def index_mul_backward(
    grad_out, in1, in2, grad_grad1, grad_grad2, keys, order, offsets, grad1, grad2, grad_grad_out, partials,
    count, in1_rows, width, column_blocks,
    ALIGN: tl.constexpr, CHUNKS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Process CHUNKS chunks of sorted positions per program, side by side.

    Computes grad2 = in1[index] * grad_out, unless grad2 is None, and sums grad_out * in2 into grad1. With grad_grad1
    and grad_grad2, computes the derivative of that instead: grad_grad_out = grad_grad1[index] * in2 + grad_grad2 *
    in1[index], grad2 = grad_grad1[index] * grad_out, and sums grad_grad2 * grad_out into grad1.
    """
    width = width // ALIGN * ALIGN
    program = tl.program_id(0)
    column = (program % column_blocks) * BLOCK + tl.arange(0, BLOCK)
    column_mask = (column < width)[None, :]
    chunk = (program // column_blocks) * CHUNKS + tl.arange(0, CHUNKS)
    first = chunk * STEPS
    end = tl.minimum(first + STEPS, count)
    current = tl.load(keys + first, mask=first < count, other=-1)
    total = tl.zeros([CHUNKS, BLOCK], tl.float32)
    for step in tl.range(0, STEPS):
        position = first + step
        live = position < count
        key = tl.load(keys + position, mask=live, other=-1)
        source = tl.load(order + position, mask=live, other=0).to(tl.int64)
        known = (key >= 0) & (key < in1_rows)
        ended = (key != current) & (current >= 0) & (current < in1_rows)
        _flush(total, current, ended, first, end, chunk, offsets, grad1, partials, column, column_mask, width)
        total = tl.where((key != current)[:, None], 0.0, total)
        current = key
        mask = live[:, None] & column_mask
        offset = source[:, None] * width + column[None, :]
        place1 = key.to(tl.int64)[:, None] * width + column[None, :]
        mask1 = known[:, None] & column_mask
        gradient = tl.load(grad_out + offset, mask=mask, other=0.0).to(tl.float32)
        if grad_grad1 is not None:
            of1 = tl.load(grad_grad1 + place1, mask=mask1, other=float("nan")).to(tl.float32)
            of2 = tl.load(grad_grad2 + offset, mask=mask, other=0.0).to(tl.float32)
            value1 = tl.load(in1 + place1, mask=mask1, other=float("nan")).to(tl.float32)
            value2 = tl.load(in2 + offset, mask=mask, other=0.0).to(tl.float32)
            product = of1 * value2 + of2 * value1
            tl.store(grad_grad_out + offset, product.to(grad_grad_out.dtype.element_ty), mask=mask)
            tl.store(grad2 + offset, (of1 * gradient).to(grad2.dtype.element_ty), mask=mask)
            total += of2 * gradient
        else:
            value2 = tl.load(in2 + offset, mask=mask, other=0.0).to(tl.float32)
            if grad2 is not None:
                value1 = tl.load(in1 + place1, mask=mask1, other=float("nan")).to(tl.float32)
                tl.store(grad2 + offset, (gradient * value1).to(grad2.dtype.element_ty), mask=mask)
            total += gradient * value2
    ended = (current >= 0) & (current < in1_rows)
    _flush(total, current, ended, first, end, chunk, offsets, grad1, partials, column, column_mask, width)


@kernel
@triton.jit
def index_mul_finish(
    keys, offsets, partials, grad1,
    count, in1_rows, width, column_blocks,
    ALIGN: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Zero the gradients of rows of in1 that no index names; add up partial sums of the row that begins in a chunk."""
    width = width // ALIGN * ALIGN
    program = tl.program_id(0) // column_blocks
    column = (tl.program_id(0) % column_blocks) * BLOCK + tl.arange(0, BLOCK)
    column_mask = (column < width)[None, :]
    row = program * ROWS + tl.arange(0, ROWS)
    begin = tl.load(offsets + row, mask=row < in1_rows, other=0)
    stop = tl.load(offsets + row + 1, mask=row < in1_rows, other=1)
    nothing = tl.zeros([ROWS, BLOCK], grad1.dtype.element_ty)
    cleared = grad1 + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(cleared, nothing, mask=(begin == stop)[:, None] & column_mask)

    first = program * STEPS
    if first < count:
        end = tl.minimum(first + STEPS, count)
        key = tl.load(keys + end - 1)
        if (key >= 0) & (key < in1_rows):
            begin_key = tl.load(offsets + key)
            stop_key = tl.load(offsets + key + 1)
            if (begin_key >= first) & (stop_key > end):
                last = (stop_key - 1) // STEPS
                total = tl.zeros([ROWS, BLOCK], tl.float32)
                for chunk in tl.range(program, last + 1, ROWS):
                    part = (chunk + tl.arange(0, ROWS)).to(tl.int64)
                    slot = 2 * part + (part == program).to(tl.int64)
                    pointers = partials + slot[:, None] * width + column[None, :]
                    total += tl.load(pointers, mask=(part <= last)[:, None] & column_mask, other=0.0)
                result = grad1 + key.to(tl.int64) * width + column
                tl.store(result, tl.sum(total, 0).to(grad1.dtype.element_ty), mask=column < width)
