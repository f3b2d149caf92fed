"""Batch norm, with an addend and ReLU behind it, in both layouts; the legend is that of kernel_tiles.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .._launch import kernel
from .kernel_tiles import COUNTS, parameter, tile


@kernel
@triton.jit(do_not_specialize=[*COUNTS, "programs"])
def batch_norm_measure(
    x,
    partials,
    steps,
    channels,
    chunks,
    units,
    programs,
    channel_blocks,
    pitch,
    LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    R: tl.constexpr,
    C_BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Mean and sum of squared deviations of every channel over a program's units, and how many values these are.

    Every element of a tile has sums of its own, of differences from a pivot: a value of the data, so that squares of
    differences from a distant mean cannot drown the variance.
    """
    program = tl.program_id(0) // channel_blocks
    block = tl.program_id(0) % channel_blocks
    channel = block * C_BLOCK + tl.arange(0, C_BLOCK)
    inside = channel < channels
    # A tile with as many rows as any that follows: only the last one of an image may have fewer.
    first = program if LAST else program // chunks * chunks
    offset, mask, _rows = tile(first, block, steps, channels, chunks, units, LAST, ALIGN, R, C_BLOCK)
    pivot = tl.load(x + offset, mask, other=0.0)
    total = tl.zeros((R, C_BLOCK), tl.float32)
    squares = tl.zeros((R, C_BLOCK), tl.float32)
    counts = tl.zeros((R,), tl.float32)
    for start in tl.range(program, units, programs * UNROLL):
        for step in tl.static_range(UNROLL):
            offset, mask, rows = tile(
                start + step * programs, block, steps, channels, chunks, units, LAST, ALIGN, R, C_BLOCK
            )
            # What is not there differs by nothing.
            away = tl.load(x + offset, mask, other=pivot).to(tl.float32) - pivot.to(tl.float32)
            total += away
            squares += away * away
            counts += tl.where(tl.arange(0, R) < rows, 1.0, 0.0)
    number = tl.sum(counts, 0)
    shift = total * (1.0 / tl.maximum(counts, 1.0))[:, None]
    # Differences from one row of pivots, which are exact where all values are alike: only the mean itself is rounded.
    base = tl.sum(tl.where((tl.arange(0, R) == 0)[:, None], pivot.to(tl.float32), 0.0), 0)
    means = pivot.to(tl.float32) - base[None, :] + shift
    mean = tl.sum(means * counts[:, None], 0) / number
    away = means - mean[None, :]
    deviations = tl.sum(tl.maximum(squares - total * shift, 0.0) + counts[:, None] * away * away, 0)
    found = partials + program.to(tl.int64) * pitch
    tl.store(found + channel, base + mean, inside)
    tl.store(found + channels + channel, deviations, inside)
    tl.store(found + 2 * channels, number, mask=block == 0)


@kernel
@triton.jit(do_not_specialize=["programs"])
def batch_norm_statistics(
    partials,
    mean,
    variance,
    running_mean,
    running_variance,
    programs,
    channels,
    pitch,
    momentum,
    RUNNING: tl.constexpr,
    PACKET: tl.constexpr,
    P_BLOCK: tl.constexpr,
    C_BLOCK: tl.constexpr,
):
    """Mean and variance of every channel from those of its parts, and what they do to the running ones.

    P_BLOCK parts at a time, around the mean of these, then by Chan's formula. Parts may be empty; if all are,
    statistics are 0 and the running ones stay. With PACKET, `mean` is one, and gets everything.
    """
    channel = tl.program_id(0) * C_BLOCK + tl.arange(0, C_BLOCK)
    inside = channel < channels
    centre = tl.zeros((C_BLOCK,), tl.float32)
    sum_of_squares = tl.zeros((C_BLOCK,), tl.float32)
    values = 0.0
    for first in range(0, programs, P_BLOCK):
        part = first + tl.arange(0, P_BLOCK)
        mask = (part < programs)[:, None] & inside[None, :]
        begin = partials + part.to(tl.int64) * pitch
        number = tl.load(begin + 2 * channels, part < programs, other=0.0)
        found = begin[:, None] + channel[None, :]
        means = tl.load(found, mask, other=0.0)
        deviations = tl.load(found + channels, mask, other=0.0)
        here = tl.sum(number, 0)
        mean_here = tl.sum(number[:, None] * means, 0) / tl.maximum(here, 1.0)
        away = means - mean_here[None, :]
        squares_here = tl.sum(deviations + number[:, None] * away * away, 0)
        shift = mean_here - centre
        share = here / tl.maximum(values + here, 1.0)
        centre += shift * share
        sum_of_squares += squares_here + shift * shift * (values * share)
        values += here
    count = tl.maximum(values, 1.0)
    tl.store(mean + channel, centre, inside)
    if PACKET:
        tl.store(mean + channels + channel, sum_of_squares, inside)
        tl.store(mean + 2 * channels, values, mask=tl.program_id(0) == 0)
    else:
        tl.store(variance + channel, sum_of_squares / count, inside)
    if RUNNING:
        old_mean = tl.load(running_mean + channel, inside, other=0.0).to(tl.float32)
        old_variance = tl.load(running_variance + channel, inside, other=0.0).to(tl.float32)
        share = momentum * tl.minimum(values, 1.0)
        new_mean = (1.0 - share) * old_mean + share * centre
        new_variance = (1.0 - share) * old_variance + share * (sum_of_squares / tl.maximum(count - 1.0, 1.0))
        tl.store(running_mean + channel, new_mean.to(running_mean.dtype.element_ty), inside)
        tl.store(running_variance + channel, new_variance.to(running_variance.dtype.element_ty), inside)


@kernel
@triton.jit(do_not_specialize=COUNTS)
def batch_norm_apply(
    x,
    z,
    weight,
    bias,
    mean,
    variance,
    y,
    steps,
    channels,
    chunks,
    units,
    channel_blocks,
    eps,
    HAS_Z: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
    LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    R: tl.constexpr,
    C_BLOCK: tl.constexpr,
):
    """The output of one tile; the last tiles first, because the pass before has left those in the cache."""
    unit = units - 1 - tl.program_id(0) // channel_blocks
    block = tl.program_id(0) % channel_blocks
    channel = block * C_BLOCK + tl.arange(0, C_BLOCK)
    inside = channel < channels
    offset, mask, _rows = tile(unit, block, steps, channels, chunks, units, LAST, ALIGN, R, C_BLOCK)
    values = tl.load(x + offset, mask, other=0.0).to(tl.float32)
    centre = tl.load(mean + channel, inside, other=0.0).to(tl.float32)
    spread = tl.load(variance + channel, inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(spread + eps) * parameter(weight, channel, inside, HAS_WEIGHT, 1.0)
    shift = parameter(bias, channel, inside, HAS_BIAS, 0.0)
    result = (values - centre[None, :]) * scale[None, :] + shift[None, :]
    if HAS_Z:
        result += tl.load(z + offset, mask, other=0.0).to(tl.float32)
    if RELU:
        # A comparison that keeps NaN, as PyTorch's ReLU does.
        result = tl.where(result < 0.0, 0.0, result)
    tl.store(y + offset, result.to(y.dtype.element_ty), mask)
