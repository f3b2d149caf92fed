"""Sums over all programs of their partial weight and bias gradients.

`partials` holds a row per program with the weight gradients, then a row per program with the bias gradients, then a row
per program with the gradients of a bias that was added to the input. Sums are made in a fixed order.
"""

import triton
import triton.language as tl

from .._launch import kernel


@triton.jit
def _sum_columns(partials, result, count, row_length, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < count)[:, None] & (column < row_length)[None, :]
        total += tl.load(partials + row.to(tl.int64)[:, None] * row_length + column[None, :], mask=mask, other=0.0)
    tl.store(result + column, tl.sum(total, 0).to(result.dtype.element_ty), mask=column < row_length)


@kernel
@triton.jit
def sum_partials(
    partials, dweight, dbias, dadded,
    count, row_length,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum `count` partial gradients per column; `program_id(1)` selects the kind of gradient."""
    row_length = row_length // ALIGN * ALIGN
    kind = tl.program_id(1)
    own = partials + kind * tl.cast(count, tl.int64) * row_length
    if kind == 0:
        _sum_columns(own, dweight, count, row_length, ROWS, BLOCK)
    if dbias is not None:
        if kind == 1:
            _sum_columns(own, dbias, count, row_length, ROWS, BLOCK)
    if dadded is not None:
        if kind == tl.num_programs(1) - 1:
            _sum_columns(own, dadded, count, row_length, ROWS, BLOCK)
