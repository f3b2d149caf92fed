"""Triton kernels of the forward pass and of the input's gradient. `kernels_common` explains the letters."""

import triton
import triton.language as tl

from .._launch import kernel
from .kernels_common import find_tile, gated, multiply


@kernel
@triton.jit
def moe_gate_up(
    x, gate_up, bias, order, tiles, offsets, pre, active,
    bound, column_blocks, chosen, hidden, width,
    ALIGN: tl.constexpr, ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr, OUT_FIRST: tl.constexpr,
    WHOLE: tl.constexpr, FULL: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Gather tokens, multiply them by their expert's matrix, apply the gated unit: ROWS x COLUMNS of `active`.

    Also stores the values before the unit, rounded. The unit takes the rounded values, as the backward pass does.
    """
    hidden = hidden // ALIGN * ALIGN
    width = width // ALIGN * ALIGN
    expert, first, mask, block = find_tile(tl.program_id(0), tiles, offsets, bound, column_blocks, ROWS, GROUP)
    if expert < 0:
        return
    row = tl.arange(0, ROWS)
    token = tl.load(order + first + row, mask=mask, other=0) // chosen
    matrix = gate_up + expert.to(tl.int64) * (2 * width) * hidden
    element = pre.dtype.element_ty
    pre += first.to(tl.int64) * (2 * width)
    active += first.to(tl.int64) * width
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = column < width
    if INTERLEAVED:
        both = block * (2 * COLUMNS) + tl.arange(0, 2 * COLUMNS)
        total, _ = multiply(
            x, matrix, matrix, token, both, 2 * width, hidden, 2 * width,
            False, OUT_FIRST, WHOLE, FULL, PRECISION, ROWS, 2 * COLUMNS, INNER,
        )  # fmt: skip
        if bias is not None:
            offset = expert.to(tl.int64) * (2 * width)
            total += tl.load(bias + offset + both, mask=both < 2 * width, other=0.0).to(tl.float32)[None, :]
        rounded = total.to(element)
        pointers = pre + row[:, None] * (2 * width) + both[None, :]
        tl.store(pointers, rounded, mask=mask[:, None] & (both < 2 * width)[None, :])
        gate, value = tl.split(tl.reshape(rounded, (ROWS, COLUMNS, 2)))
    else:
        second = matrix + (width if OUT_FIRST else tl.cast(width, tl.int64) * hidden)
        gate, value = multiply(
            x, matrix, second, token, column, width, hidden, 2 * width,
            True, OUT_FIRST, WHOLE, FULL, PRECISION, ROWS, COLUMNS, INNER,
        )  # fmt: skip
        if bias is not None:
            offset = bias + expert.to(tl.int64) * (2 * width) + column
            gate += tl.load(offset, mask=column_mask, other=0.0).to(tl.float32)[None, :]
            value += tl.load(offset + width, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        gate = gate.to(element)
        value = value.to(element)
        pointers = pre + row[:, None] * (2 * width) + column[None, :]
        tl.store(pointers, gate, mask=mask[:, None] & column_mask[None, :])
        tl.store(pointers + width, value, mask=mask[:, None] & column_mask[None, :])
    unit, _, _ = gated(gate.to(tl.float32), value.to(tl.float32), ACTIVATION)
    pointers = active + row[:, None] * width + column[None, :]
    tl.store(pointers, unit.to(element), mask=mask[:, None] & column_mask[None, :])


@kernel
@triton.jit
def moe_product(
    left, right, bias, tiles, offsets, output,
    bound, column_blocks, inner, columns,
    ALIGN: tl.constexpr, OUT_FIRST: tl.constexpr, WHOLE: tl.constexpr, FULL: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiply sorted rows of `left` [N, inner] by their expert's matrix: ROWS x COLUMNS of `output` [N, columns]."""
    inner = inner // ALIGN * ALIGN
    columns = columns // ALIGN * ALIGN
    expert, first, mask, block = find_tile(tl.program_id(0), tiles, offsets, bound, column_blocks, ROWS, GROUP)
    if expert < 0:
        return
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    matrix = right + expert.to(tl.int64) * inner * columns
    row = first + tl.arange(0, ROWS)
    total, _ = multiply(
        left, matrix, matrix, tl.where(mask, row, first), column, columns, inner, columns,
        False, OUT_FIRST, WHOLE, FULL, PRECISION, ROWS, COLUMNS, INNER,
    )  # fmt: skip
    column_mask = column < columns
    if bias is not None:
        vector = bias + expert.to(tl.int64) * columns
        total += tl.load(vector + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    pointers = output + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(pointers, total.to(output.dtype.element_ty), mask=mask[:, None] & column_mask[None, :])


@kernel
@triton.jit
def moe_combine(
    rows, inverse, offsets, weight, output, pre,
    experts, chosen, hidden, column_blocks, pre_columns,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum a token's K sorted rows, times their weights if there are any, in a fixed order.

    Rows of `pre` [N, pre_columns] without an expert become zero, because products do not write them.
    """
    hidden = hidden // ALIGN * ALIGN
    token = (tl.program_id(0) // column_blocks).to(tl.int64)
    column = (tl.program_id(0) % column_blocks) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(offsets + experts)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.range(0, chosen):
        position = tl.load(inverse + token * chosen + k)
        # Rows without an expert are past the end, where nothing was stored.
        mask = column < tl.where(position < end, hidden, 0)
        value = tl.load(rows + position.to(tl.int64) * hidden + column, mask=mask, other=0.0).to(tl.float32)
        if weight is not None:
            value *= tl.load(weight + token * chosen + k).to(tl.float32)
        total += value
        if pre is not None:
            if position >= end:
                for start in tl.range(0, pre_columns, column_blocks * BLOCK):
                    target = pre + position.to(tl.int64) * pre_columns + start + column
                    tl.store(target, tl.zeros([BLOCK], pre.dtype.element_ty), mask=start + column < pre_columns)
    tl.store(output + token * hidden + column, total.to(output.dtype.element_ty), mask=column < hidden)
