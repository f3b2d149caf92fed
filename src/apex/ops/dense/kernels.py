"""Triton kernels of the dense layers: the steps that PyTorch's matrix products do not include.

All matrices are contiguous, all arithmetic is float32. Run-time arguments first, constants last.
"""

import triton
import triton.language as tl

from .._kernel_functions import is_last_block, sum_rows
from .._launch import kernel

RELU = tl.constexpr(1)
SIGMOID = tl.constexpr(2)
GELU = tl.constexpr(3)
GELU_ERF = tl.constexpr(4)
GELU_QUICK = tl.constexpr(5)
RELU_SQUARED = tl.constexpr(7)


@triton.jit
def _gelu_gate(x, square):
    """Return the factor of x in the tanh form of gelu: sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x**3))."""
    return tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * square))


@triton.jit
def _gelu_gate_and_slope(x):
    """Return the gate of gelu and the derivative of gelu."""
    # Beyond 11 both are exactly 0 or 1, and terms may overflow. NaN must stay NaN.
    x = tl.minimum(x, 11.0, propagate_nan=tl.PropagateNan.ALL)
    x = tl.maximum(x, -11.0, propagate_nan=tl.PropagateNan.ALL)
    square = x * x
    gate = _gelu_gate(x, square)
    return gate, gate + x * gate * (1.0 - gate) * (1.5957691216057308 + 0.21406444881780076 * square)


@triton.jit
def _gate_and_slope(x, ACTIVATION: tl.constexpr):
    """Return the factor of x in an activation, and the activation's derivative."""
    if ACTIVATION == GELU:
        gate, slope = _gelu_gate_and_slope(x)
    elif ACTIVATION == GELU_ERF:
        gate = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        slope = gate + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif ACTIVATION == RELU_SQUARED:
        gate = tl.where(x < 0.0, 0.0, x)
        slope = 2.0 * gate
    else:
        RATE: tl.constexpr = 1.702 if ACTIVATION == GELU_QUICK else 1.0
        gate = tl.sigmoid(RATE * x)
        slope = gate + RATE * x * gate * (1.0 - gate)
    return gate, slope


@triton.jit
def _active(x, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    x = x.to(tl.float32)
    if ACTIVATION == GELU:
        gate = _gelu_gate(x, x * x)
    else:
        gate, _ = _gate_and_slope(x, ACTIVATION)
    return (x * gate).to(dtype)


@kernel
@triton.jit
def gelu_forward(input, output, elements, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Compute an activation x * gate(x), such as gelu.

    Only the last program uses a mask: with a mask, Triton loads an odd number of values one by one.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = start + tl.arange(0, BLOCK)
    if start + BLOCK <= elements:
        tl.store(output + index, _active(tl.load(input + index), ACTIVATION, output.dtype.element_ty))
    else:
        mask = index < elements
        x = tl.load(input + index, mask=mask)
        tl.store(output + index, _active(x, ACTIVATION, output.dtype.element_ty), mask=mask)


@kernel
@triton.jit
def activation_backward(
    dy, saved, dz, active, partials, tickets, dbias,
    rows, columns, rows_per_program,
    ALIGN: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    FULL: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    """Compute the gradient before an activation, and its sums over the rows of a program: the bias gradient.

    `saved` is the output of relu and sigmoid, the input of others. `dz` may be `dy`. `active`, or None, becomes the
    activation's output.
    A program has BLOCK columns and `rows_per_program` rows (a multiple of ROWS) and writes its own row of `partials`.
    If there is only one row of partials, it is the bias gradient itself. FULL: no row or column needs a mask.
    With FINISH, not 0, these rows are summed here too, which saves the host a launch. The last of every FINISH programs
    sums their rows into a further row of `partials`, and the last of these programs sums the further rows into `dbias`.
    ALIGN, a power of two up to 16, divides `columns`, which tells Triton how wide loads may be.
    """
    columns = columns // ALIGN * ALIGN
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1)
    first = group * rows_per_program
    last = tl.minimum(first + rows_per_program, rows)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        offset = row.to(tl.int64)[:, None] * columns + column[None, :]
        mask = None if FULL else (row < rows)[:, None] & (column < columns)[None, :]
        zero = None if FULL else 0.0
        gradient = tl.load(dy + offset, mask=mask, other=zero).to(tl.float32)
        value = tl.load(saved + offset, mask=mask, other=zero).to(tl.float32)
        if ACTIVATION == RELU:
            gradient = tl.where(value <= 0.0, 0.0, gradient)
        elif ACTIVATION == SIGMOID:
            gradient = gradient * value * (1.0 - value)
        else:
            gate, slope = _gate_and_slope(value, ACTIVATION)
            gradient = gradient * slope
            if active is not None:
                tl.store(active + offset, (value * gate).to(active.dtype.element_ty), mask=mask)
        tl.store(dz + offset, gradient.to(dz.dtype.element_ty), mask=mask)
        if partials is not None:
            sums += gradient
    if partials is not None:
        pointers = partials + group.to(tl.int64) * columns + column
        tl.store(pointers, tl.sum(sums, 0).to(partials.dtype.element_ty), mask=None if FULL else column < columns)
        if FINISH:
            programs = tl.num_programs(1)
            unions = tl.cdiv(programs, FINISH)
            union = group // FINISH
            members = tl.minimum(FINISH, programs - union * FINISH)
            own_tickets = tickets + tl.program_id(0) * (1 + unions)
            if is_last_block(own_tickets + 1 + union, members):
                first_row = partials + (union * FINISH).to(tl.int64) * columns
                rows_of_unions = partials + tl.cast(programs, tl.int64) * columns
                total = sum_rows(first_row, members, column, columns, ROWS)
                tl.store(rows_of_unions + union.to(tl.int64) * columns + column, total, column < columns)
                if is_last_block(own_tickets, unions):
                    total = sum_rows(rows_of_unions, unions, column, columns, ROWS)
                    tl.store(dbias + column, total.to(dbias.dtype.element_ty), column < columns)


@kernel
@triton.jit
def accumulate_weight_gradient(
    d_output, input, d_weight,
    rows, outs, ins,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BAND: tl.constexpr, FULL: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute d_weight[outs, ins] += d_output[rows, outs]^T input[rows, ins]; used if PyTorch has no such operator.

    Programs take the tiles of `d_weight` in bands of BAND rows of tiles, so that programs that run at the same time
    read the same inputs. FULL: no tile needs a mask. WIDEN: multiply in float32, because Triton's interpreter
    multiplies the bits of bfloat16 numbers as integers.
    """
    program = tl.program_id(0)
    tiles_in = tl.cdiv(ins, BLOCK_IN)
    tiles_out = tl.cdiv(outs, BLOCK_OUT)
    band = program // (BAND * tiles_in)
    height = tl.minimum(tiles_out - band * BAND, BAND)
    within = program % (BAND * tiles_in)
    out = (band * BAND + within % height) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    column = (within // height) * BLOCK_IN + tl.arange(0, BLOCK_IN)
    product = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    for start in tl.range(0, rows, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        wide = row.to(tl.int64)[:, None]
        zero = None if FULL else 0.0
        out_mask = None if FULL else (row < rows)[:, None] & (out < outs)[None, :]
        in_mask = None if FULL else (row < rows)[:, None] & (column < ins)[None, :]
        gradient = tl.load(d_output + wide * outs + out[None, :], mask=out_mask, other=zero)
        value = tl.load(input + wide * ins + column[None, :], mask=in_mask, other=zero)
        if WIDEN:
            gradient = gradient.to(tl.float32)
            value = value.to(tl.float32)
        product = tl.dot(tl.trans(gradient), value, product)
    pointers = d_weight + out.to(tl.int64)[:, None] * ins + column[None, :]
    mask = None if FULL else (out < outs)[:, None] & (column < ins)[None, :]
    tl.store(pointers, tl.load(pointers, mask=mask) + product, mask=mask)
