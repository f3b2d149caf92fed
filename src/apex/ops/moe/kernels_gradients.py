"""Triton kernels of the gradients of unit, weights, matrices and biases. `kernels_common` explains the letters.

With a the gated unit, p the weight of a row and dy its token's gradient: da = W2^T dy, dp = <a, da> + <b2, dy>, dz the
gradient of the unit for p da, dW2 = sum of dy (p a)^T, dW1 = sum of dz x^T.
"""

import triton
import triton.language as tl

from .._launch import kernel
from ..attention.kernels_common import dot
from .kernels_common import find_tile, gated, multiply


@triton.jit
def _store_unit_backward(
    dactive, pre, dpre, scaled, partials, p, first, mask, block, count, width,
    ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store dz, p a, and this block's part of dp, from da (without p)."""
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    row = first + tl.arange(0, ROWS)
    wide = row.to(tl.int64)[:, None]
    inside = mask[:, None] & (column < width)[None, :]
    if INTERLEAVED:
        both = block * (2 * COLUMNS) + tl.arange(0, 2 * COLUMNS)
        offset = wide * (2 * width) + both[None, :]
        both_mask = mask[:, None] & (both < 2 * width)[None, :]
        values = tl.load(pre + offset, mask=both_mask, other=0.0)
        gate, value = tl.split(tl.reshape(values, (ROWS, COLUMNS, 2)))
    else:
        offset = wide * (2 * width) + column[None, :]
        gate = tl.load(pre + offset, mask=inside, other=0.0)
        value = tl.load(pre + offset + width, mask=inside, other=0.0)
    unit, by_gate, by_value = gated(gate.to(tl.float32), value.to(tl.float32), ACTIVATION)
    part = tl.sum(tl.where(inside, unit * dactive, 0.0), 1)
    tl.store(partials + tl.cast(block, tl.int64) * count + row, part, mask=mask)
    if scaled is not None:
        target = scaled + wide * width + column[None, :]
        tl.store(target, (p[:, None] * unit).to(scaled.dtype.element_ty), mask=inside)
    dunit = dactive * p[:, None]
    element = dpre.dtype.element_ty
    dgate = (dunit * by_gate).to(element)
    dvalue = (dunit * by_value).to(element)
    if INTERLEAVED:
        tl.store(dpre + offset, tl.reshape(tl.join(dgate, dvalue), (ROWS, 2 * COLUMNS)), mask=both_mask)
    else:
        tl.store(dpre + offset, dgate, mask=inside)
        tl.store(dpre + offset + width, dvalue, mask=inside)


@kernel
@triton.jit
def moe_down_backward(
    dy, down, pre, weight, order, tiles, offsets, dpre, scaled, partials,
    bound, column_blocks, count, chosen, hidden, width,
    ALIGN: tl.constexpr, ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr, OUT_FIRST: tl.constexpr,
    WHOLE: tl.constexpr, FULL: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute a tile of da = W2^T dy from the tokens' gradients, and from da a tile of dz, of p a and of dp."""
    hidden = hidden // ALIGN * ALIGN
    width = width // ALIGN * ALIGN
    expert, first, mask, block = find_tile(tl.program_id(0), tiles, offsets, bound, column_blocks, ROWS, GROUP)
    if expert < 0:
        return
    flat = tl.load(order + first + tl.arange(0, ROWS), mask=mask, other=0)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    matrix = down + expert.to(tl.int64) * hidden * width
    dactive, _ = multiply(
        dy, matrix, matrix, flat // chosen, column, width, hidden, width,
        False, OUT_FIRST, WHOLE, FULL, PRECISION, ROWS, COLUMNS, INNER,
    )  # fmt: skip
    p = tl.load(weight + flat, mask=mask, other=0.0).to(tl.float32)
    _store_unit_backward(
        dactive, pre, dpre, scaled, partials, p, first, mask, block, count, width,
        ACTIVATION, INTERLEAVED, ROWS, COLUMNS,
    )  # fmt: skip


@kernel
@triton.jit
def moe_unit_backward(
    dactive, pre, weight, order, offsets, dpre, scaled, partials,
    experts, column_blocks, count, width,
    ALIGN: tl.constexpr, ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute a tile of dz, of p a and of dp from da [N, F], which another library computed."""
    width = width // ALIGN * ALIGN
    block = tl.program_id(0) % column_blocks
    first = (tl.program_id(0) // column_blocks) * ROWS
    row = first + tl.arange(0, ROWS)
    mask = row < tl.load(offsets + experts)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    pointers = dactive + row.to(tl.int64)[:, None] * width + column[None, :]
    da = tl.load(pointers, mask=mask[:, None] & (column < width)[None, :], other=0.0).to(tl.float32)
    p = tl.load(weight + tl.load(order + row, mask=mask, other=0), mask=mask, other=0.0).to(tl.float32)
    _store_unit_backward(
        da, pre, dpre, scaled, partials, p, first, mask, block, count, width, ACTIVATION, INTERLEAVED, ROWS, COLUMNS
    )


@kernel
@triton.jit
def moe_router_gradient(
    partials, index, inverse, dy, bias, dweight,
    count, experts, chosen, hidden, column_blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up the parts of dp, and the product of the second bias with dy; zero for rows without an expert."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    expert = tl.load(index + row, mask=inside, other=-1)
    mask = inside & (expert >= 0) & (expert < experts)
    position = tl.load(inverse + row, mask=mask, other=0).to(tl.int64)
    total = tl.zeros([ROWS], tl.float32)
    for block in tl.range(0, column_blocks):
        total += tl.load(partials + tl.cast(block, tl.int64) * count + position, mask=mask, other=0.0)
    if bias is not None:
        token = (row // chosen).to(tl.int64)
        for start in tl.range(0, hidden, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            both = mask[:, None] & (column < hidden)[None, :]
            gradient = tl.load(dy + token[:, None] * hidden + column[None, :], mask=both, other=0.0).to(tl.float32)
            offset = tl.where(mask, expert, 0).to(tl.int64)[:, None] * hidden + column[None, :]
            total += tl.sum(gradient * tl.load(bias + offset, mask=both, other=0.0).to(tl.float32), 1)
    tl.store(dweight + row, total.to(dweight.dtype.element_ty), mask=inside)


@kernel
@triton.jit
def moe_matrix_gradient(
    left, right, order, offsets, output,
    chosen, outs, ins,
    ALIGN: tl.constexpr, LEFT_TOKENS: tl.constexpr, RIGHT_TOKENS: tl.constexpr, ACCUMULATE: tl.constexpr,
    FULL: tl.constexpr, PRECISION: tl.constexpr, OUT: tl.constexpr, INTO: tl.constexpr, ROWS: tl.constexpr,
    BAND: tl.constexpr,
):  # fmt: skip
    """Compute a tile of left^T right over an expert's rows: `output` [E, outs, ins].

    `left` and `right` have sorted rows or, with LEFT_TOKENS or RIGHT_TOKENS, one row per token. ACCUMULATE adds to
    `output`, and leaves the matrix of an expert without rows unchanged.
    """
    outs = outs // ALIGN * ALIGN
    ins = ins // ALIGN * ALIGN
    expert = tl.program_id(1)
    start, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    if ACCUMULATE:
        if start == end:
            return
    program = tl.program_id(0)
    tiles_in = tl.cdiv(ins, INTO)
    tiles_out = tl.cdiv(outs, OUT)
    band = program // (BAND * tiles_in)
    height = tl.minimum(tiles_out - band * BAND, BAND)
    within = program % (BAND * tiles_in)
    out = (band * BAND + within % height) * OUT + tl.arange(0, OUT)
    column = (within // height) * INTO + tl.arange(0, INTO)
    product = tl.zeros([OUT, INTO], tl.float32)
    for first in tl.range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = row < end
        token = row
        if LEFT_TOKENS or RIGHT_TOKENS:
            token = tl.load(order + row, mask=mask, other=0) // chosen
        left_row = (token if LEFT_TOKENS else row).to(tl.int64)[:, None]
        right_row = (token if RIGHT_TOKENS else row).to(tl.int64)[:, None]
        left_mask = mask[:, None] if FULL else mask[:, None] & (out < outs)[None, :]
        right_mask = mask[:, None] if FULL else mask[:, None] & (column < ins)[None, :]
        a = tl.load(left + left_row * outs + out[None, :], mask=left_mask, other=0.0)
        b = tl.load(right + right_row * ins + column[None, :], mask=right_mask, other=0.0)
        product = dot(tl.trans(a), b, product, PRECISION)
    matrix = output + expert.to(tl.int64) * outs * ins
    pointers = matrix + out[:, None] * ins + column[None, :]
    tile_mask = (out < outs)[:, None] & (column < ins)[None, :]
    if ACCUMULATE:
        product += tl.load(pointers, mask=tile_mask, other=0.0).to(tl.float32)
    tl.store(pointers, product.to(output.dtype.element_ty), mask=tile_mask)


@kernel
@triton.jit
def moe_bias_gradient(
    values, weight, order, offsets, dbias,
    chosen, columns,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum an expert's sorted rows or, if weights are given, the tokens' rows times the weights."""
    expert = tl.program_id(1)
    start, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = row < end
        if weight is not None:
            flat = tl.load(order + row, mask=mask, other=0)
            scale = tl.load(weight + flat, mask=mask, other=0.0).to(tl.float32)
            row = flat // chosen
        pointers = values + row.to(tl.int64)[:, None] * columns + column[None, :]
        block = tl.load(pointers, mask=mask[:, None] & (column < columns)[None, :], other=0.0).to(tl.float32)
        total += block if weight is None else block * scale[:, None]
    sums = tl.sum(total, 0).to(dbias.dtype.element_ty)
    tl.store(dbias + expert.to(tl.int64) * columns + column, sums, mask=column < columns)
