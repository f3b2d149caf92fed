"""Triton kernels of gated linear units: forward and backward.

An input is `rows` x (2 * `width`), contiguous: the gate in the first half of each row, the value in the second. If
`value` and `dvalue` are given, they and the input (then the gate alone) are `rows` x `width` each. All arithmetic is
float32. A tile is ROWS x BLOCK of the output; FULL: no row or column needs a mask. Programs are numbered
along the columns first, so that neighbours read neighbouring memory. ALIGN, a power of two up to 16, divides `width`:
dividing and multiplying by ALIGN tells Triton how wide loads may be.
"""

import triton
import triton.language as tl

from .._launch import kernel


@triton.jit
def activation(x, KIND: tl.constexpr):
    """Return the activation of x and its derivative; the compiler drops a result that a kernel does not use."""
    if KIND == "silu":
        s = tl.sigmoid(x)
        y = x * s
        slope = s + y * (1.0 - s)
    elif KIND == "gelu_tanh":
        # (1 + tanh(u)) / 2 is sigmoid(2 u).
        s = tl.sigmoid(x * (1.5957691216057308 + 0.07135481627159998 * x * x))
        y = x * s
        slope = s + y * (1.0 - s) * (1.5957691216057308 + 0.21406444881479994 * x * x)
    elif KIND == "gelu":
        s = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        y = x * s
        slope = s + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        # A comparison with zero is false for NaN, which so stays NaN.
        y = tl.where(x < 0.0, 0.0, x)
        slope = tl.where(x <= 0.0, 0.0, 1.0)
    return y, slope


@triton.jit
def _places(input, value, row, column, width):
    """Return pointers to the gates and to the values of a tile."""
    if value is None:
        gates = input + row[:, None] * (2 * width) + column[None, :]
        values = gates + width
    else:
        gates = input + row[:, None] * width + column[None, :]
        values = value + row[:, None] * width + column[None, :]
    return gates, values


@kernel
@triton.jit
def glu_forward(
    input, value, bias, output,
    rows, width, column_blocks,
    ALIGN: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Compute a tile of activation(gate) * value per program; a bias is added to both first."""
    width = width // ALIGN * ALIGN
    program = tl.program_id(0)
    row = (program // column_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (program % column_blocks) * BLOCK + tl.arange(0, BLOCK)
    column_mask = None if FULL else column < width
    mask = None if FULL else (row < rows)[:, None] & (column < width)[None, :]
    gates, values = _places(input, value, row, column, width)
    gate = tl.load(gates, mask=mask).to(tl.float32)
    x = tl.load(values, mask=mask).to(tl.float32)
    if bias is not None:
        gate += tl.load(bias + column, mask=column_mask).to(tl.float32)[None, :]
        x += tl.load(bias + width + column, mask=column_mask).to(tl.float32)[None, :]
    activated, _ = activation(gate, ACTIVATION)
    result = (activated * x).to(output.dtype.element_ty)
    tl.store(output + row[:, None] * width + column[None, :], result, mask=mask)


@kernel
@triton.jit
def glu_backward(
    dy, input, value, bias, dinput, dvalue, partials,
    rows, width, column_blocks, groups,
    ALIGN: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute every `groups`-th tile of a block of columns per program; write sums of columns to `partials`."""
    width = width // ALIGN * ALIGN
    program = tl.program_id(0)
    group = program // column_blocks
    column = (program % column_blocks) * BLOCK + tl.arange(0, BLOCK)
    column_mask = None if FULL else column < width
    if bias is not None:
        gate_bias = tl.load(bias + column, mask=column_mask).to(tl.float32)[None, :]
        value_bias = tl.load(bias + width + column, mask=column_mask).to(tl.float32)[None, :]
    gate_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    value_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(group, tl.cdiv(rows, ROWS), groups, num_stages=STAGES):
        row = tile * tl.full([ROWS], ROWS, tl.int64) + tl.arange(0, ROWS)
        mask = None if FULL else (row < rows)[:, None] & (column < width)[None, :]
        zero = None if FULL else 0.0
        gates, values = _places(input, value, row, column, width)
        gate = tl.load(gates, mask=mask, other=zero).to(tl.float32)
        x = tl.load(values, mask=mask, other=zero).to(tl.float32)
        gradient = tl.load(dy + row[:, None] * width + column[None, :], mask=mask, other=zero).to(tl.float32)
        if bias is not None:
            gate += gate_bias
            x += value_bias
        activated, slope = activation(gate, ACTIVATION)
        dgate = gradient * x * slope
        dx = gradient * activated
        dgates, dvalues = _places(dinput, dvalue, row, column, width)
        tl.store(dgates, dgate.to(dinput.dtype.element_ty), mask=mask)
        tl.store(dvalues, dx.to(dinput.dtype.element_ty), mask=mask)
        if partials is not None:
            gate_sum += dgate
            value_sum += dx
    if partials is not None:
        pointers = partials + group.to(tl.int64) * (2 * width) + column
        tl.store(pointers, tl.sum(gate_sum, 0), mask=column_mask)
        tl.store(pointers + width, tl.sum(value_sum, 0), mask=column_mask)
