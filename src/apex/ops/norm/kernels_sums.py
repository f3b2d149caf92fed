"""Sums over all programs of their partial weight and bias gradients.

`partials` holds a row per program with the weight gradients, then a row per program with the bias gradients, then a row
per program with the gradients of a bias that was added to the input. Sums are made in a fixed order.
"""

import triton
import triton.language as tl

from .._launch import kernel


@kernel
@triton.jit(do_not_specialize=["count"])
def sum_partials(
    partials, dweight, dbias, dadded,
    count, row_length,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum `count` partial gradients per column; `program_id(1)` selects the kind of gradient."""
    row_length = row_length // ALIGN * ALIGN
    kind = tl.program_id(1)
    own = partials + kind * tl.cast(count, tl.int64) * row_length
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < count)[:, None] & (column < row_length)[None, :]
        total += tl.load(own + row.to(tl.int64)[:, None] * row_length + column[None, :], mask=mask, other=0.0)
    result = tl.sum(total, 0)
    # Only the stores differ: each copy of the loop above would be compiled by itself.
    if kind == 0:
        tl.store(dweight + column, result.to(dweight.dtype.element_ty), mask=column < row_length)
    if dbias is not None:
        if kind == 1:
            tl.store(dbias + column, result.to(dbias.dtype.element_ty), mask=column < row_length)
    if dadded is not None:
        if kind == tl.num_programs(1) - 1:
            tl.store(dadded + column, result.to(dadded.dtype.element_ty), mask=column < row_length)
