"""Sums over all programs of the partial weight and bias gradients that each of them has left.

`partials` holds a row per program with the weight gradients, after those a row per program with the bias gradients, and
after those one with the gradients of a bias that was added to the input. They are added in a fixed order either way.
"""

import triton
import triton.language as tl

from .._kernel_functions import is_last_block
from .._launch import kernel


@triton.jit
def _sum_rows(source, count, row_length, column, MOST: tl.constexpr):
    """The sum of `count` rows, at most MOST, which other programs of this launch have stored."""
    total = tl.zeros(column.shape, tl.float32)
    for row in tl.static_range(MOST):  # all loads at once: four at a time took 3 us more of 20
        mask = (column < row_length) & (row < count)
        total += tl.load(source + row * row_length + column, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def add_up(partials, tickets, dweight, dbias, dadded, row_length, column, GROUP: tl.constexpr):
    """The end of a kernel whose programs have stored their partials: the last program of a GROUP adds up the group's,
    the last of those adds up the sums of groups, which lie behind the partials and are at most GROUP, too.
    """
    kinds: tl.constexpr = 1 + (dbias is not None) + (dadded is not None)
    programs = tl.num_programs(0)
    groups = tl.cdiv(programs, GROUP)
    group = tl.program_id(0) // GROUP
    members = tl.minimum(GROUP, programs - group * GROUP)
    first = partials + group * GROUP * row_length
    mask = column < row_length
    sums = partials + kinds * programs * row_length
    if is_last_block(tickets + 1 + group, members):
        for kind in tl.static_range(kinds):
            total = _sum_rows(first + kind * programs * row_length, members, row_length, column, GROUP)
            tl.store(sums + (kind * groups + group) * row_length + column, total, mask)
        if is_last_block(tickets, groups):
            total = _sum_rows(sums, groups, row_length, column, GROUP)
            tl.store(dweight + column, total.to(dweight.dtype.element_ty), mask)
            if dbias is not None:
                total = _sum_rows(sums + groups * row_length, groups, row_length, column, GROUP)
                tl.store(dbias + column, total.to(dbias.dtype.element_ty), mask)
            if dadded is not None:
                total = _sum_rows(sums + (kinds - 1) * groups * row_length, groups, row_length, column, GROUP)
                tl.store(dadded + column, total.to(dadded.dtype.element_ty), mask)


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
    """Adds `count` partial gradients per column, one kind of them in each row of programs."""
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
