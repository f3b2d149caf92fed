"""Sums over all programs of their partial weight and bias gradients.

`partials` holds a row per program with the weight gradients, then a row per program with the bias gradients, then a row
per program with the gradients of a bias that was added to the input. Kinds of gradients that a norm lacks are left out.
Sums are made in a fixed order.
"""

import triton
import triton.language as tl

from .._launch import kernel


@kernel
@triton.jit
def sum_partials(
    partials, first, second, third,
    count, row_length,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum `count` partial gradients per column; `program_id(1)` selects the kind of gradient and its result.

    Results beyond the number of kinds are never written. They are tensors all the same, not None, so that norms with
    one, two and three kinds share a compiled program.
    """
    row_length = row_length // ALIGN * ALIGN
    kind = tl.program_id(1)
    own = partials + kind * tl.cast(count, tl.int64) * row_length
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < count)[:, None] & (column < row_length)[None, :]
        total += tl.load(own + row.to(tl.int64)[:, None] * row_length + column[None, :], mask=mask, other=0.0)
    result = tl.sum(total, 0)
    # Only the stores differ: each copy of the loop above would be compiled by itself.
    if kind == 0:
        tl.store(first + column, result.to(first.dtype.element_ty), mask=column < row_length)
    if kind == 1:
        tl.store(second + column, result.to(second.dtype.element_ty), mask=column < row_length)
    if kind == 2:
        tl.store(third + column, result.to(third.dtype.element_ty), mask=column < row_length)
