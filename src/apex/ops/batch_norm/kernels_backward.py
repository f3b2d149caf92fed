"""The backward pass of batch norm; the legend is that of kernel_tiles.py.

MASK says what ReLU let through: 0 everything (there is none), 1 where its argument, computed again, is positive (there
is no addend), 2 where the output is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._launch import kernel
from .kernel_tiles import COUNTS, parameter, tile


@triton.jit
def _let_through(gradient, values, x, y, offset, mask, mean, scale, shift, MASK: tl.constexpr):
    """The gradient at the argument of ReLU."""
    if MASK == 1:
        # Rounded as the output was, which may be 0 then.
        output = ((values - mean[None, :]) * scale[None, :] + shift[None, :]).to(x.dtype.element_ty)
        gradient = tl.where(output > 0.0, gradient, 0.0)
    elif MASK == 2:
        output = tl.load(y + offset, mask, other=0.0)
        gradient = tl.where(output > 0.0, gradient, 0.0)
    return gradient


@kernel
@triton.jit(do_not_specialize=[*COUNTS, "programs"])
def batch_norm_measure_backward(
    x,
    dy,
    y,
    weight,
    bias,
    mean,
    variance,
    dz,
    partials,
    steps,
    channels,
    chunks,
    units,
    programs,
    channel_blocks,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MASK: tl.constexpr,
    WRITE_DZ: tl.constexpr,
    LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    R: tl.constexpr,
    C_BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Sums of the gradient and of gradient times normalised input over a program's units.

    With WRITE_DZ the gradient that ReLU lets through is kept: it is that of the addend.
    """
    program = tl.program_id(0) // channel_blocks
    block = tl.program_id(0) % channel_blocks
    channel = block * C_BLOCK + tl.arange(0, C_BLOCK)
    inside = channel < channels
    centre = tl.load(mean + channel, inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.load(variance + channel, inside, other=0.0).to(tl.float32) + eps)
    scale = factor * parameter(weight, channel, inside, HAS_WEIGHT, 1.0)
    shift = parameter(bias, channel, inside, HAS_BIAS, 0.0)
    plain = tl.zeros((R, C_BLOCK), tl.float32)
    along = tl.zeros((R, C_BLOCK), tl.float32)
    for start in tl.range(program, units, programs * UNROLL):
        for step in tl.static_range(UNROLL):
            offset, mask, _rows = tile(
                start + step * programs, block, steps, channels, chunks, units, LAST, ALIGN, R, C_BLOCK
            )
            values = tl.load(x + offset, mask, other=0.0).to(tl.float32)
            # Outside the input the gradient is 0, and so is every term.
            gradient = tl.load(dy + offset, mask, other=0.0).to(tl.float32)
            gradient = _let_through(gradient, values, x, y, offset, mask, centre, scale, shift, MASK)
            if WRITE_DZ:
                tl.store(dz + offset, gradient.to(dz.dtype.element_ty), mask)
            plain += gradient
            along += gradient * (values - centre[None, :])
    found = partials + program.to(tl.int64) * 2 * channels + channel
    tl.store(found, tl.sum(plain, 0), inside)
    tl.store(found + channels, tl.sum(along, 0) * factor, inside)


@kernel
@triton.jit(do_not_specialize=["programs"])
def batch_norm_sums(
    partials,
    plain,
    along,
    packet,
    programs,
    channels,
    count,
    PACKET: tl.constexpr,
    P_BLOCK: tl.constexpr,
    C_BLOCK: tl.constexpr,
):
    """Adds up what the programs of the pass before have found: the gradients of bias and weight.

    With PACKET they are written to one too, with `count`.
    """
    channel = tl.program_id(0) * C_BLOCK + tl.arange(0, C_BLOCK)
    inside = channel < channels
    first_sum = tl.zeros((P_BLOCK, C_BLOCK), tl.float32)
    second_sum = tl.zeros((P_BLOCK, C_BLOCK), tl.float32)
    for first in range(0, programs, P_BLOCK):
        part = first + tl.arange(0, P_BLOCK)
        mask = (part < programs)[:, None] & inside[None, :]
        found = partials + part.to(tl.int64)[:, None] * 2 * channels + channel[None, :]
        first_sum += tl.load(found, mask, other=0.0)
        second_sum += tl.load(found + channels, mask, other=0.0)
    all_plain, all_along = tl.sum(first_sum, 0), tl.sum(second_sum, 0)
    tl.store(plain + channel, all_plain, inside)
    tl.store(along + channel, all_along, inside)
    if PACKET:
        tl.store(packet + channel, all_plain, inside)
        tl.store(packet + channels + channel, all_along, inside)
        tl.store(packet + 2 * channels, count, mask=tl.program_id(0) == 0)


@kernel
@triton.jit(do_not_specialize=COUNTS)
def batch_norm_apply_backward(
    x,
    dy,
    y,
    weight,
    bias,
    mean,
    variance,
    plain,
    along,
    dx,
    steps,
    channels,
    chunks,
    units,
    channel_blocks,
    eps,
    inverse_count,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MASK: tl.constexpr,
    BATCH: tl.constexpr,
    PACKET: tl.constexpr,
    LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    R: tl.constexpr,
    C_BLOCK: tl.constexpr,
):
    """The gradient of one tile of the input; without BATCH the statistics did not depend on the input.

    With PACKET, `plain` is one, of all processes together, and nothing is asked of `along` and `inverse_count`.
    """
    unit = units - 1 - tl.program_id(0) // channel_blocks
    block = tl.program_id(0) % channel_blocks
    channel = block * C_BLOCK + tl.arange(0, C_BLOCK)
    inside = channel < channels
    offset, mask, _rows = tile(unit, block, steps, channels, chunks, units, LAST, ALIGN, R, C_BLOCK)
    gradient = tl.load(dy + offset, mask, other=0.0).to(tl.float32)
    values = gradient
    if BATCH or MASK == 1:
        values = tl.load(x + offset, mask, other=0.0).to(tl.float32)
    centre = tl.load(mean + channel, inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.load(variance + channel, inside, other=0.0).to(tl.float32) + eps)
    scale = factor * parameter(weight, channel, inside, HAS_WEIGHT, 1.0)
    shift = parameter(bias, channel, inside, HAS_BIAS, 0.0)
    gradient = _let_through(gradient, values, x, y, offset, mask, centre, scale, shift, MASK)
    if BATCH:
        if PACKET:
            along = plain + channels
            inverse_count = 1.0 / tl.maximum(tl.load(plain + 2 * channels), 1.0)
        mean_plain = tl.load(plain + channel, inside, other=0.0) * inverse_count
        mean_along = tl.load(along + channel, inside, other=0.0) * inverse_count * factor
        gradient -= mean_plain[None, :] + (values - centre[None, :]) * mean_along[None, :]
    tl.store(dx + offset, (gradient * scale[None, :]).to(dx.dtype.element_ty), mask)
