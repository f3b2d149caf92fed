"""Functions that the kernels of a mixture's experts share, and the letters of all of them.

Letters: T tokens, E experts, K experts per token (`chosen`), H hidden size, F width, N = T K rows. `order` holds the
rows by expert, and `inverse` the position of each row in `order`. Expert e has the sorted rows `offsets[e]` to
`offsets[e + 1]`. Token and weight of a row n are n // K and `weight[n]`. `tiles` [2, bound] cuts the sorted rows into
tiles of ROWS rows of one expert. OUT_FIRST: neighbours in an expert's matrix belong to neighbouring columns of a
product, otherwise to neighbouring terms of its sums.

ALIGN, a power of two up to 16, divides all sizes, which tells Triton how wide loads may be. WHOLE: the inner dimension
is a multiple of INNER; FULL: the columns are a multiple of COLUMNS. Otherwise masks are needed.
All sums are float32.
"""

import triton
import triton.language as tl

from ..attention.kernels_common import dot
from ..glu.kernels import activation


@triton.jit
def find_tile(program, tiles, offsets, bound, column_blocks, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Return a program's expert (-1: nothing to do), first sorted row, mask of rows, and block of columns.

    Programs go through the columns in groups of GROUP tiles, so that programs at the same time share matrices.
    """
    first = (program // (GROUP * column_blocks)) * GROUP
    height = tl.minimum(bound - first, GROUP)
    within = program % (GROUP * column_blocks)
    tile = first + within % height
    expert = tl.load(tiles + tile)
    first_row = tl.load(tiles + bound + tile)
    end = tl.load(offsets + tl.maximum(expert, 0) + 1)
    return expert, first_row, tl.arange(0, ROWS) < end - first_row, within // height


@triton.jit
def multiply(
    left, right, second, left_row, column, columns, inner, outs,
    PAIR: tl.constexpr, OUT_FIRST: tl.constexpr, WHOLE: tl.constexpr, FULL: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Return rows of `left` [., inner] times columns of `right` and, if PAIR, times columns of `second`.

    An expert's matrix has `outs` columns in all, `columns` of them from `right` on. `left_row` are valid rows; a tile
    with fewer rows repeats one. Results outside of the tile or the columns are unspecified.
    """
    depth = tl.arange(0, INNER)
    left_place = left + left_row.to(tl.int64)[:, None] * inner + depth[None, :]
    if OUT_FIRST:
        right_offset = column[None, :] + depth[:, None] * outs
    else:
        right_offset = column[None, :] * inner + depth[:, None]
    column_mask = (column < columns)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    other = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, inner, INNER):
        if WHOLE:
            a = tl.load(left_place + start)
            mask = None if FULL else column_mask
        else:
            rest = depth < inner - start
            a = tl.load(left_place + start, mask=rest[None, :], other=0.0)
            mask = rest[:, None] if FULL else rest[:, None] & column_mask
        zero = None if WHOLE and FULL else 0.0
        step = start * outs if OUT_FIRST else start
        total = dot(a, tl.load(right + step + right_offset, mask=mask, other=zero), total, PRECISION)
        if PAIR:
            other = dot(a, tl.load(second + step + right_offset, mask=mask, other=zero), other, PRECISION)
    return total, other


@triton.jit
def gated(gate, value, ACTIVATION: tl.constexpr):
    """Return the gated unit and its derivatives by gate and value; the compiler drops unused results."""
    if ACTIVATION == "clamped":
        # Comparisons with NaN are false, so NaN stays NaN.
        low = tl.where(gate > 7.0, 7.0, gate)
        bounded = tl.where(value > 7.0, 7.0, tl.where(value < -7.0, -7.0, value))
        s = tl.sigmoid(1.702 * low)
        by_value = low * s
        unit = (bounded + 1.0) * by_value
        by_gate = tl.where(gate > 7.0, 0.0, (bounded + 1.0) * (s + 1.702 * by_value * (1.0 - s)))
        by_value = tl.where(tl.abs(value) > 7.0, 0.0, by_value)
    else:
        by_value, slope = activation(gate, ACTIVATION)
        unit = by_value * value
        by_gate = slope * value
    return unit, by_gate, by_value
