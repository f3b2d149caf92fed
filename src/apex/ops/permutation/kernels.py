"""Triton kernel of the permutation search: the best way to divide 8 columns between two stripes, for many windows.

columns  float32 [C, R]   absolute values, a column of the weight in each row
windows  int32 [N, 8]     indices of the columns of each window
gains    float32 [N]      magnitude that the best split keeps in excess of split 0
best     int32 [N]        number of that split, the first of equally good ones
"""

import triton
import triton.language as tl

from .._launch import kernel


@triton.jit
def _column(columns, window, PLACE: tl.constexpr, rows, row):
    start = tl.load(window + PLACE).to(tl.int64) * rows
    return tl.load(columns + start + row, mask=row < rows, other=0.0)


@triton.jit
def _kept(a, b, c, d):
    """Return the sum of the two largest of four numbers."""
    return tl.maximum(tl.maximum(a, b) + tl.maximum(c, d), tl.maximum(a + b, c + d))


@triton.jit
def _add(totals, split, NUMBER: tl.constexpr, a, b, c, d, e, f, g, h):
    """Add the magnitude that split NUMBER, with stripes a, b, c, d and e, f, g, h, keeps of these rows to its total."""
    kept = tl.sum(_kept(a, b, c, d) + _kept(e, f, g, h), 0)
    return tl.where(split == NUMBER, totals + kept, totals)


@triton.jit
def _add_five(
    totals, split, a, b, c, d, e, f, g, h,
    V: tl.constexpr, W: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    """Add five splits with these numbers; seven rotations of b to h cover all 35 splits."""
    totals = _add(totals, split, V, a, b, c, d, e, f, g, h)
    totals = _add(totals, split, W, a, b, c, e, d, f, g, h)
    totals = _add(totals, split, X, a, b, c, f, d, e, g, h)
    totals = _add(totals, split, Y, a, b, c, g, d, e, f, h)
    return _add(totals, split, Z, a, b, d, f, c, e, g, h)


@kernel
@triton.jit
def best_splits(columns, windows, gains, best, rows, BLOCK: tl.constexpr):
    """Find the best split of one window per program, BLOCK rows at a time; sums are made in a fixed order.

    A program has one warp, so that sums need no shared memory.
    """
    number = tl.program_id(0).to(tl.int64)
    window = windows + number * 8
    split = tl.arange(0, 64)
    totals = tl.zeros([64], tl.float32)
    for first in tl.range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        a, b = _column(columns, window, 0, rows, row), _column(columns, window, 1, rows, row)
        c, d = _column(columns, window, 2, rows, row), _column(columns, window, 3, rows, row)
        e, f = _column(columns, window, 4, rows, row), _column(columns, window, 5, rows, row)
        g, h = _column(columns, window, 6, rows, row), _column(columns, window, 7, rows, row)
        totals = _add_five(totals, split, a, b, c, d, e, f, g, h, 0, 1, 2, 3, 6)
        totals = _add_five(totals, split, a, c, d, e, f, g, h, b, 15, 16, 17, 18, 20)
        totals = _add_five(totals, split, a, d, e, f, g, h, b, c, 25, 26, 27, 5, 29)
        totals = _add_five(totals, split, a, e, f, g, h, b, c, d, 31, 32, 9, 19, 10)
        totals = _add_five(totals, split, a, f, g, h, b, c, d, e, 34, 12, 22, 28, 23)
        totals = _add_five(totals, split, a, g, h, b, c, d, e, f, 14, 24, 30, 33, 7)
        totals = _add_five(totals, split, a, h, b, c, d, e, f, g, 4, 8, 11, 13, 21)
    totals = tl.where(split < 35, totals, -1.0)
    top = tl.max(totals, 0)
    tl.store(best + number, tl.min(tl.where(totals == top, split, 34), 0))
    tl.store(gains + number, top - tl.sum(tl.where(split == 0, totals, 0.0), 0))
