"""Kernels that apply scale, bias, ReLU and mask to a convolution's output, and fold frozen norms into weights."""

import triton
import triton.language as tl

from .._launch import kernel


@kernel
@triton.jit
def conv_epilogue(values, scale, bias, mask, elements, channels, BLOCK: tl.constexpr):
    """Compute max(values * scale + bias, 0) in place, and 0 where `mask` is 0; channels are contiguous."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < elements
    channel = (offset % channels).to(tl.int32)
    result = tl.load(values + offset, inside, other=0.0).to(tl.float32)
    if scale is not None:
        result *= tl.load(scale + channel, inside, other=0.0).to(tl.float32)
    if bias is not None:
        result += tl.load(bias + channel, inside, other=0.0).to(tl.float32)
    result = tl.where(result <= 0.0, 0.0, result)  # not by tl.maximum: NaN must stay NaN
    if mask is not None:
        result = tl.where(tl.load(mask + offset, inside, other=0) == 0, 0.0, result)
    tl.store(values + offset, result.to(values.dtype.element_ty), inside)


@triton.jit
def _fold_norm(weight, gamma, scaled, beta, mean, variance, scale, shift, rows, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if weight is not None:
        if row < rows:
            factor = tl.load(gamma + row).to(tl.float32)
            if variance is not None:
                root = tl.sqrt_rn(tl.load(variance + row).to(tl.float32))
                rounded = tl.div_rn(factor, root).to(scale.dtype.element_ty)
                tl.store(scale + row, rounded)
                factor = rounded.to(tl.float32)
                bias = tl.load(beta + row).to(tl.float32) - tl.load(mean + row).to(tl.float32) * factor
                tl.store(shift + row, bias.to(shift.dtype.element_ty))
            first = row.to(tl.int64) * columns
            for start in range(0, columns, BLOCK):
                column = start + tl.arange(0, BLOCK)
                result = tl.load(weight + first + column, column < columns, other=0.0).to(tl.float32) * factor
                tl.store(scaled + first + column, result.to(scaled.dtype.element_ty), column < columns)


@kernel
@triton.jit
def fold_norms(
    weight0, gamma0, scaled0, beta0, mean0, variance0, scale0, shift0,
    weight1, gamma1, scaled1, beta1, mean1, variance1, scale1, shift1,
    weight2, gamma2, scaled2, beta2, mean2, variance2, scale2, shift2,
    weight3, gamma3, scaled3, beta3, mean3, variance3, scale3, shift3,
    rows0, columns0, rows1, columns1, rows2, columns2, rows3, columns3,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute scaled = weight * scale for up to four weights, by `program_id(1)`; each row is an output channel.

    Stores scale = gamma / sqrt(variance) and shift = beta - mean * scale; without a variance gamma is the scale.
    """
    which = tl.program_id(1)
    if which == 0:
        _fold_norm(weight0, gamma0, scaled0, beta0, mean0, variance0, scale0, shift0, rows0, columns0, BLOCK)
    elif which == 1:
        _fold_norm(weight1, gamma1, scaled1, beta1, mean1, variance1, scale1, shift1, rows1, columns1, BLOCK)
    elif which == 2:
        _fold_norm(weight2, gamma2, scaled2, beta2, mean2, variance2, scale2, shift2, rows2, columns2, BLOCK)
    else:
        _fold_norm(weight3, gamma3, scaled3, beta3, mean3, variance3, scale3, shift3, rows3, columns3, BLOCK)
