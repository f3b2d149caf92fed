"""Sums over all programs of the partial weight and bias gradients that each of them has left.

`partials` holds a row per program with the weight gradients, after those a row per program with the bias gradients, and
after those one with the gradients of a bias that was added to the input. They are added in a fixed order either way.
"""

import triton
import triton.language as tl

from .._kernel_functions import is_last_block, mask_if
from .._launch import kernel

# Rows that are loaded at once. Unrolling all 17 of a group made the kernel take 2 to 5 seconds to compile.
_AT_ONCE = tl.constexpr(6)


@triton.jit
def _sum_rows(source, count, row_length, column):
    """Return the sum of `count` rows, which other programs of this launch have stored."""
    total = tl.zeros(column.shape, tl.float32)
    for first in tl.range(0, count, _AT_ONCE):
        for step in tl.static_range(_AT_ONCE):
            mask = mask_if(first + step < count, column < row_length)
            place = source + (first + step) * row_length + column
            total += tl.load(place, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def add_up(partials, tickets, dweight, dbias, dadded, row_length, column, GROUP: tl.constexpr):
    """Add up the partial gradients of all programs, at the end of the kernel that stored them.

    The last program of a GROUP adds up the group's partials; the last of those programs adds up the sums of the groups,
    which lie behind the partials.
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
        for kind in tl.range(kinds):
            total = _sum_rows(first + kind * programs * row_length, members, row_length, column)
            tl.store(sums + (kind * groups + group) * row_length + column, total, mask)
        if is_last_block(tickets, groups):
            for kind in tl.range(kinds):
                total = _sum_rows(sums + kind * groups * row_length, groups, row_length, column)
                if kind == 0:
                    tl.store(dweight + column, total.to(dweight.dtype.element_ty), mask)
                if dbias is not None:
                    if kind == 1:
                        tl.store(dbias + column, total.to(dbias.dtype.element_ty), mask)
                if dadded is not None:
                    if kind == kinds - 1:
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
