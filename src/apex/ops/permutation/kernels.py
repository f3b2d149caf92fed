"""Triton kernel of the permutation search: the best way to share 8 columns among two stripes, for many windows.

columns  float32 [C, R]   absolute values, a column of the weight in each row
windows  int32 [N, 8]     numbers of the columns of each window
gains    float32 [N]      what the best split keeps more than split 0
best     int32 [N]        the number of that split, the first of equally good ones
"""

import triton
import triton.language as tl

from .._launch import kernel


@triton.jit
def _kept(a, b, c, d):
    """The sum of the two largest of four."""
    return tl.maximum(tl.maximum(a, b) + tl.maximum(c, d), tl.maximum(a + b, c + d))


@triton.jit
def _add(totals, split, NUMBER: tl.constexpr, a, b, c, d, e, f, g, h):
    """Adds what split NUMBER, with the stripes a, b, c, d and e, f, g, h, keeps of some rows."""
    kept = tl.sum(_kept(a, b, c, d) + _kept(e, f, g, h), 0)
    return tl.where(split == NUMBER, totals + kept, totals)


@kernel
@triton.jit
def best_splits(columns, windows, gains, best, rows, BLOCK: tl.constexpr):
    """One window per program, BLOCK rows at a time; sums are added in the order of the rows, so that they are fixed.

    One warp per program: then sums need no shared memory.
    """
    window = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, 64)
    totals = tl.zeros([64], tl.float32)
    at = windows + window * 8
    p0 = columns + tl.load(at).to(tl.int64) * rows
    p1 = columns + tl.load(at + 1).to(tl.int64) * rows
    p2 = columns + tl.load(at + 2).to(tl.int64) * rows
    p3 = columns + tl.load(at + 3).to(tl.int64) * rows
    p4 = columns + tl.load(at + 4).to(tl.int64) * rows
    p5 = columns + tl.load(at + 5).to(tl.int64) * rows
    p6 = columns + tl.load(at + 6).to(tl.int64) * rows
    p7 = columns + tl.load(at + 7).to(tl.int64) * rows
    for first in tl.range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        mask = row < rows
        a = tl.load(p0 + row, mask=mask, other=0.0)
        b = tl.load(p1 + row, mask=mask, other=0.0)
        c = tl.load(p2 + row, mask=mask, other=0.0)
        d = tl.load(p3 + row, mask=mask, other=0.0)
        e = tl.load(p4 + row, mask=mask, other=0.0)
        f = tl.load(p5 + row, mask=mask, other=0.0)
        g = tl.load(p6 + row, mask=mask, other=0.0)
        h = tl.load(p7 + row, mask=mask, other=0.0)
        totals = _add(totals, split, 0, a, b, c, d, e, f, g, h)
        totals = _add(totals, split, 1, a, b, c, e, d, f, g, h)
        totals = _add(totals, split, 2, a, b, c, f, d, e, g, h)
        totals = _add(totals, split, 3, a, b, c, g, d, e, f, h)
        totals = _add(totals, split, 4, a, b, c, h, d, e, f, g)
        totals = _add(totals, split, 5, a, b, d, e, c, f, g, h)
        totals = _add(totals, split, 6, a, b, d, f, c, e, g, h)
        totals = _add(totals, split, 7, a, b, d, g, c, e, f, h)
        totals = _add(totals, split, 8, a, b, d, h, c, e, f, g)
        totals = _add(totals, split, 9, a, b, e, f, c, d, g, h)
        totals = _add(totals, split, 10, a, b, e, g, c, d, f, h)
        totals = _add(totals, split, 11, a, b, e, h, c, d, f, g)
        totals = _add(totals, split, 12, a, b, f, g, c, d, e, h)
        totals = _add(totals, split, 13, a, b, f, h, c, d, e, g)
        totals = _add(totals, split, 14, a, b, g, h, c, d, e, f)
        totals = _add(totals, split, 15, a, c, d, e, b, f, g, h)
        totals = _add(totals, split, 16, a, c, d, f, b, e, g, h)
        totals = _add(totals, split, 17, a, c, d, g, b, e, f, h)
        totals = _add(totals, split, 18, a, c, d, h, b, e, f, g)
        totals = _add(totals, split, 19, a, c, e, f, b, d, g, h)
        totals = _add(totals, split, 20, a, c, e, g, b, d, f, h)
        totals = _add(totals, split, 21, a, c, e, h, b, d, f, g)
        totals = _add(totals, split, 22, a, c, f, g, b, d, e, h)
        totals = _add(totals, split, 23, a, c, f, h, b, d, e, g)
        totals = _add(totals, split, 24, a, c, g, h, b, d, e, f)
        totals = _add(totals, split, 25, a, d, e, f, b, c, g, h)
        totals = _add(totals, split, 26, a, d, e, g, b, c, f, h)
        totals = _add(totals, split, 27, a, d, e, h, b, c, f, g)
        totals = _add(totals, split, 28, a, d, f, g, b, c, e, h)
        totals = _add(totals, split, 29, a, d, f, h, b, c, e, g)
        totals = _add(totals, split, 30, a, d, g, h, b, c, e, f)
        totals = _add(totals, split, 31, a, e, f, g, b, c, d, h)
        totals = _add(totals, split, 32, a, e, f, h, b, c, d, g)
        totals = _add(totals, split, 33, a, e, g, h, b, c, d, f)
        totals = _add(totals, split, 34, a, f, g, h, b, c, d, e)
    totals = tl.where(split < 35, totals, -1.0)
    top = tl.max(totals, 0)
    tl.store(best + window, tl.min(tl.where(totals == top, split, 34), 0))
    tl.store(gains + window, top - tl.sum(tl.where(split == 0, totals, 0.0), 0))
