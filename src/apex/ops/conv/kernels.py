"""What follows a convolution, in one pass over its output, in place; frozen batch norms and the weights they scale."""

import triton
import triton.language as tl

from .._launch import kernel


@kernel
@triton.jit
def conv_epilogue(
    values,
    scale,
    bias,
    mask,
    elements,
    channels,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """max(values * scale + bias, 0), and 0 where `mask` is 0; channels lie side by side."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < elements
    channel = (offset % channels).to(tl.int32)
    result = tl.load(values + offset, inside, other=0.0).to(tl.float32)
    if HAS_SCALE:
        result *= tl.load(scale + channel, inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + channel, inside, other=0.0).to(tl.float32)
    result = tl.where(result <= 0.0, 0.0, result)  # not by tl.maximum: NaN must stay NaN
    if HAS_MASK:
        result = tl.where(tl.load(mask + offset, inside, other=0) == 0, 0.0, result)
    tl.store(values + offset, result.to(values.dtype.element_ty), inside)


@triton.jit
def _frozen_norm(weight, bias, mean, variance, scale, shift, channels, BLOCK: tl.constexpr):
    if weight is not None:
        channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = channel < channels
        root = tl.sqrt_rn(tl.load(variance + channel, inside, other=1.0).to(tl.float32))
        factor = tl.div_rn(tl.load(weight + channel, inside, other=0.0).to(tl.float32), root)
        factor = factor.to(scale.dtype.element_ty)
        tl.store(scale + channel, factor, inside)
        moved = tl.load(mean + channel, inside, other=0.0).to(tl.float32) * factor.to(tl.float32)
        moved = tl.load(bias + channel, inside, other=0.0).to(tl.float32) - moved
        tl.store(shift + channel, moved.to(shift.dtype.element_ty), inside)


@kernel
@triton.jit
def frozen_norms(
    weight0,
    bias0,
    mean0,
    variance0,
    scale0,
    shift0,
    weight1,
    bias1,
    mean1,
    variance1,
    scale1,
    shift1,
    weight2,
    bias2,
    mean2,
    variance2,
    scale2,
    shift2,
    weight3,
    bias3,
    mean3,
    variance3,
    scale3,
    shift3,
    channels0,
    channels1,
    channels2,
    channels3,
    BLOCK: tl.constexpr,
):
    """scale = weight / sqrt(variance) and shift = bias - mean * scale of up to four norms, by `program_id(1)`."""
    norm = tl.program_id(1)
    if norm == 0:
        _frozen_norm(weight0, bias0, mean0, variance0, scale0, shift0, channels0, BLOCK)
    elif norm == 1:
        _frozen_norm(weight1, bias1, mean1, variance1, scale1, shift1, channels1, BLOCK)
    elif norm == 2:
        _frozen_norm(weight2, bias2, mean2, variance2, scale2, shift2, channels2, BLOCK)
    else:
        _frozen_norm(weight3, bias3, mean3, variance3, scale3, shift3, channels3, BLOCK)


@triton.jit
def _scaled_row(values, scale, target, rows, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if values is not None:
        if row < rows:
            factor = tl.load(scale + row).to(tl.float32)
            first = row.to(tl.int64) * columns
            for start in range(0, columns, BLOCK):
                column = start + tl.arange(0, BLOCK)
                result = tl.load(values + first + column, column < columns, other=0.0).to(tl.float32) * factor
                tl.store(target + first + column, result.to(target.dtype.element_ty), column < columns)


@kernel
@triton.jit
def scaled_rows(
    values0,
    scale0,
    target0,
    values1,
    scale1,
    target1,
    values2,
    scale2,
    target2,
    values3,
    scale3,
    target3,
    rows0,
    columns0,
    rows1,
    columns1,
    rows2,
    columns2,
    rows3,
    columns3,
    BLOCK: tl.constexpr,
):
    """target = values * scale of up to four matrices with a scale for each row, by `program_id(1)`."""
    matrix = tl.program_id(1)
    if matrix == 0:
        _scaled_row(values0, scale0, target0, rows0, columns0, BLOCK)
    elif matrix == 1:
        _scaled_row(values1, scale1, target1, rows1, columns1, BLOCK)
    elif matrix == 2:
        _scaled_row(values2, scale2, target2, rows2, columns2, BLOCK)
    else:
        _scaled_row(values3, scale3, target3, rows3, columns3, BLOCK)
