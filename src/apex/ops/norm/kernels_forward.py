"""Triton kernels of the forward pass of layer norm and RMS norm.

A tensor is `rows` x `row_length`, contiguous; `statistics` holds the reciprocal deviation of each row, then (for layer
norm) the mean of each row. All arithmetic is float32. Run-time arguments come first, constants last.

ALIGN is a power of two up to 16 that divides `row_length`. Triton itself knows only multiples of 16. Dividing and
multiplying by ALIGN tells it the others, so that rows of 3000 half-precision elements are read 16 bytes at a time.
"""

import triton
import triton.language as tl

from .._launch import kernel


@kernel
@triton.jit(do_not_specialize=["rows"])
def norm_forward_rows(
    input, weight, bias, residual, added, total, output, statistics,
    rows, row_length, eps,
    ALIGN: tl.constexpr, SUBTRACT_MEAN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Normalise ROWS whole rows per program, held in registers. FULL: no row or column needs a mask.

    With a `residual`, normalise `total` = input + residual + `added`, a bias or None, and store it.
    """
    row_length = row_length // ALIGN * ALIGN
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    offset = row[:, None] * row_length + column[None, :]
    row_mask = None if FULL else row < rows
    column_mask = None if FULL else column < row_length
    mask = None if FULL else row_mask[:, None] & column_mask[None, :]
    zero = None if FULL else 0.0
    x = tl.load(input + offset, mask=mask, other=zero).to(tl.float32)
    if residual is not None:
        if added is not None:
            x += tl.load(added + column, mask=column_mask, other=zero).to(tl.float32)[None, :]
        x += tl.load(residual + offset, mask=mask, other=zero).to(tl.float32)
        rounded = x.to(total.dtype.element_ty)
        tl.store(total + offset, rounded, mask=mask)
        x = rounded.to(tl.float32)
    if SUBTRACT_MEAN:
        row_mean = tl.sum(x, 1) / row_length
        tl.store(statistics + rows + row, row_mean, mask=row_mask)
        x = x - row_mean[:, None]
        if not FULL:
            x = tl.where(mask, x, 0.0)
    row_rstd = tl.rsqrt(tl.sum(x * x, 1) / row_length + eps)
    tl.store(statistics + row, row_rstd, mask=row_mask)
    y = x * row_rstd[:, None]
    if weight is not None:
        y = y * tl.load(weight + column, mask=column_mask).to(tl.float32)[None, :]
    if bias is not None:
        y = y + tl.load(bias + column, mask=column_mask).to(tl.float32)[None, :]
    tl.store(output + offset, y.to(output.dtype.element_ty), mask=mask)


@kernel
@triton.jit
def norm_forward_long(
    input, weight, bias, output, statistics,
    row_length, eps,
    ALIGN: tl.constexpr, SUBTRACT_MEAN: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """Normalise one row of any length per program, in chunks, read twice: the second time from the cache.

    Few registers mean many programs in flight; with the eviction hints that beats holding the row in registers from
    4096 columns on (RMS norm float32 16384x4096: 129 us instead of 135). The row is at least one chunk long. FULL: the
    chunks divide it. STREAM: the output is too large to stay in the cache until its next reader.
    """
    row_length = row_length // ALIGN * ALIGN
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    row_input = input + row * row_length
    row_output = output + row * row_length
    chunks = tl.cdiv(row_length, BLOCK)
    lane_squares = tl.zeros([BLOCK], tl.float32)
    zero = None if FULL else 0.0
    if SUBTRACT_MEAN:
        # Each lane sums deviations from the first element it loaded. That element is one of its samples, so the squared
        # deviations are at least of the order of the term subtracted below, and nothing cancels.
        first = tl.load(row_input + column, eviction_policy="evict_last").to(tl.float32)
        lane_sum = tl.zeros([BLOCK], tl.float32)
        for chunk in tl.range(1, chunks):
            position = chunk * BLOCK + column
            mask = None if FULL else position < row_length
            x = tl.load(row_input + position, mask=mask, eviction_policy="evict_last").to(tl.float32)
            deviation = x - first if FULL else tl.where(position < row_length, x - first, 0.0)
            lane_sum += deviation
            lane_squares += deviation * deviation
        lane_count = tl.cdiv(row_length - column, BLOCK).to(tl.float32)
        lane_offset = lane_sum / lane_count
        row_mean = tl.sum((first + lane_offset) * lane_count) / row_length
        tl.store(statistics + tl.num_programs(0) + row, row_mean)
        lane_deviation = first + lane_offset - row_mean
        lane_squares += (lane_deviation * lane_deviation - lane_offset * lane_offset) * lane_count
    else:
        row_mean = 0.0
        for chunk in tl.range(0, chunks):
            position = chunk * BLOCK + column
            mask = None if FULL else position < row_length
            x = tl.load(row_input + position, mask=mask, other=zero, eviction_policy="evict_last").to(tl.float32)
            lane_squares += x * x
    row_rstd = tl.rsqrt(tl.sum(lane_squares) / row_length + eps)
    tl.store(statistics + row, row_rstd)
    for chunk in tl.range(0, chunks):
        position = chunk * BLOCK + column
        mask = None if FULL else position < row_length
        x = tl.load(row_input + position, mask=mask, eviction_policy="evict_first").to(tl.float32)
        y = (x - row_mean) * row_rstd
        if weight is not None:
            y = y * tl.load(weight + position, mask=mask, eviction_policy="evict_last").to(tl.float32)
        if bias is not None:
            y = y + tl.load(bias + position, mask=mask, eviction_policy="evict_last").to(tl.float32)
        tl.store(
            row_output + position, y.to(output.dtype.element_ty), mask=mask, cache_modifier=".cs" if STREAM else ""
        )
