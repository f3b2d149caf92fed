"""Kernels for batch norm in training with one launch each way, for channels whose values fit into one program.

Legend: a program has all `count` values of C_BLOCK channels, [R, C_BLOCK], in memory [count, C] (LAST) or [I, C, S]
with S positions; offsets fit 32 bits. The other names are explained in kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._kernel_functions import parameter
from .._launch import kernel
from .kernels import _masked, active


@triton.jit
def everything(count, positions, channels, LAST: tl.constexpr, R: tl.constexpr, C_BLOCK: tl.constexpr):
    """Return the offsets of the values, [R, C_BLOCK], their mask, the channels, and the mask of the channels."""
    row = tl.arange(0, R)[:, None]
    channel = tl.program_id(0) * C_BLOCK + tl.arange(0, C_BLOCK)
    column = channel[None, :]
    if LAST:
        offset = row * channels + column
    else:
        offset = row // positions * (positions * channels) + column * positions + row % positions
    inside = channel < channels
    return offset, (row < count) & inside[None, :], channel, inside


@kernel
@triton.jit(do_not_specialize=["count", "positions"])
def batch_norm_whole(
    x, z, weight, bias, running_mean, running_variance, mean, variance, y,
    count, positions, channels, eps, momentum,
    ACTIVATION: tl.constexpr, LAST: tl.constexpr, R: tl.constexpr, C_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the statistics, update the running statistics, and compute the output."""
    offset, mask, channel, inside = everything(count, positions, channels, LAST, R, C_BLOCK)
    values = tl.load(x + offset, mask, other=0.0).to(tl.float32)
    # Differences from a value of the data, so that a distant mean costs no digits.
    pivot = tl.sum(tl.where((tl.arange(0, R) == 0)[:, None], values, 0.0), 0)
    centre = tl.sum(tl.where(mask, values - pivot[None, :], 0.0), 0) / count + pivot
    away = tl.where(mask, values - centre[None, :], 0.0)
    deviations = tl.sum(away * away, 0)
    spread = deviations / count
    tl.store(mean + channel, centre, inside)
    tl.store(variance + channel, spread, inside)
    if running_mean is not None:
        old_mean = tl.load(running_mean + channel, inside, other=0.0).to(tl.float32)
        old_variance = tl.load(running_variance + channel, inside, other=0.0).to(tl.float32)
        new_mean = (1.0 - momentum) * old_mean + momentum * centre
        new_variance = (1.0 - momentum) * old_variance + momentum * (deviations / tl.maximum(count - 1, 1))
        tl.store(running_mean + channel, new_mean.to(running_mean.dtype.element_ty), inside)
        tl.store(running_variance + channel, new_variance.to(running_variance.dtype.element_ty), inside)
    scale = tl.rsqrt(spread + eps) * parameter(weight, channel, inside, 1.0)
    result = away * scale[None, :] + parameter(bias, channel, inside, 0.0)[None, :]
    if z is not None:
        result += tl.load(z + offset, mask, other=0.0).to(tl.float32)
    result = active(result, ACTIVATION)
    tl.store(y + offset, result.to(y.dtype.element_ty), mask)


@kernel
@triton.jit(do_not_specialize=["count", "positions"])
def batch_norm_whole_backward(
    x, dy, y, weight, bias, mean, variance, sum_dy, sum_dy_xhat, dx, dz,
    count, positions, channels, eps,
    ACTIVATION: tl.constexpr, LAST: tl.constexpr, R: tl.constexpr, C_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the sums, which are the gradients of bias and weight, and the gradients of input and addend."""
    offset, mask, channel, inside = everything(count, positions, channels, LAST, R, C_BLOCK)
    values = tl.load(x + offset, mask, other=0.0).to(tl.float32)
    gradient = tl.load(dy + offset, mask, other=0.0).to(tl.float32)
    centre = tl.load(mean + channel, inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.load(variance + channel, inside, other=0.0).to(tl.float32) + eps)
    scale = factor * parameter(weight, channel, inside, 1.0)
    shift = parameter(bias, channel, inside, 0.0)
    away = values - centre[None, :]
    gradient = _masked(gradient, away, x, y, offset, mask, scale, shift, ACTIVATION)
    if dz is not None:
        tl.store(dz + offset, gradient.to(dz.dtype.element_ty), mask)
    total_dy = tl.sum(gradient, 0)
    total_dy_xhat = tl.sum(gradient * away, 0) * factor
    tl.store(sum_dy + channel, total_dy, inside)
    tl.store(sum_dy_xhat + channel, total_dy_xhat, inside)
    gradient -= (total_dy / count)[None, :] + away * (total_dy_xhat / count * factor)[None, :]
    tl.store(dx + offset, (gradient * scale[None, :]).to(dx.dtype.element_ty), mask)
