"""Triton kernels of the Newton-Schulz iteration: a product whose result is known to be symmetric, and a scaled copy.

left, right  [B, n, K]   any strides
addend, out  [B, n, n]   contiguous

Only tiles on and below the diagonal are computed; each is stored twice, the second time transposed. This halves the
work of a general product.
"""

import triton
import triton.language as tl

from .._launch import kernel


@kernel
@triton.jit
def symmetric_product(
    left, right, addend, out,
    n, depth,
    left_batch, left_row, left_column,
    right_batch, right_row, right_column,
    alpha, beta,
    TILE: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, LARGE: tl.constexpr, WIDE: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Compute one tile of `alpha left rightᵀ + beta addend` and its mirror image per program.

    EVEN: n and K are multiples of TILE and DEPTH, so that no load needs a mask. LARGE: a result has 2**31 elements or
    more; otherwise offsets in it are 32-bit numbers, since 64-bit ones take 99 registers more. WIDE: convert to float32
    first, for Triton's interpreter, which cannot multiply bfloat16. DESCRIBED: left and right are descriptors of
    matrices [B n, K] ("rows") or, transposed, [B K, n] ("columns"), and EVEN; None: they are addresses.
    """
    number = tl.program_id(0)
    # Tiles are counted row by row: row i starts at i (i + 1) / 2. The root may be off by one for large numbers.
    row = ((tl.sqrt((8 * number + 1).to(tl.float32)) - 1) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > number, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= number, row + 1, row)
    column = number - row * (row + 1) // 2
    batch = tl.program_id(1).to(tl.int64)

    rows = row * TILE + tl.arange(0, TILE)
    columns = column * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE, TILE], tl.float32)
    if DESCRIBED is None:
        steps = tl.arange(0, DEPTH)
        left += batch * left_batch + rows.to(tl.int64)[:, None] * left_row + steps[None, :] * left_column
        right += batch * right_batch + columns.to(tl.int64)[:, None] * right_row + steps[None, :] * right_column
    for start in tl.range(0, depth, DEPTH):
        if DESCRIBED == "rows":
            first = tl.program_id(1) * n
            a = left.load([first + row * TILE, start])
            b = tl.trans(right.load([first + column * TILE, start]))
        elif DESCRIBED == "columns":
            first = tl.program_id(1) * depth + start
            a = tl.trans(left.load([first, row * TILE]))
            b = right.load([first, column * TILE])
        else:
            if EVEN:
                a = tl.load(left)
                b = tl.trans(tl.load(right))
            else:
                inside = (start + steps < depth)[None, :]
                a = tl.load(left, mask=inside & (rows < n)[:, None], other=0.0)
                b = tl.trans(tl.load(right, mask=inside & (columns < n)[:, None], other=0.0))
            left += DEPTH * left_column
            right += DEPTH * right_column
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total)

    total = total * alpha
    if LARGE:
        rows, columns = rows.to(tl.int64), columns.to(tl.int64)
    out += batch * n * n
    inside = (rows < n)[:, None] & (columns < n)[None, :]
    offsets = rows[:, None] * n + columns[None, :]
    if addend is not None:
        if EVEN:
            total += beta * tl.load(addend + batch * n * n + offsets).to(tl.float32)
        else:
            total += beta * tl.load(addend + batch * n * n + offsets, mask=inside, other=0.0).to(tl.float32)
    result = total.to(out.dtype.element_ty)
    mirrored = columns[:, None] * n + rows[None, :]
    if EVEN:
        tl.store(out + offsets, result)
        if row != column:
            tl.store(out + mirrored, tl.trans(result))
    else:
        tl.store(out + offsets, result, mask=inside)
        if row != column:
            tl.store(out + mirrored, tl.trans(result), mask=(columns < n)[:, None] & (rows < n)[None, :])


@kernel
@triton.jit
def divided_copy(matrices, norms, out, elements, eps, BLOCK: tl.constexpr):
    """Write BLOCK of the `elements` of one matrix, divided by the larger of its norm and `eps`, per program.

    matrices, out  [B, elements]   contiguous
    norms          float32 [B]
    """
    batch = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    factor = 1.0 / tl.maximum(tl.load(norms + batch), eps)
    offsets = start + tl.arange(0, BLOCK)
    matrices += batch * elements
    out += batch * elements
    if start + BLOCK <= elements:
        x = tl.load(matrices + offsets).to(tl.float32)
        tl.store(out + offsets, (x * factor).to(out.dtype.element_ty))
    else:
        x = tl.load(matrices + offsets, mask=offsets < elements).to(tl.float32)
        tl.store(out + offsets, (x * factor).to(out.dtype.element_ty), mask=offsets < elements)
