"""Batch norm, with an addend and ReLU behind it, in both layouts.

Legend: a tensor has I images of S positions and C channels, in memory [I, S, C] (LAST; then I is 1 and S counts the
positions of all images) or [I, C, S]. It is cut into tiles of R positions and C_BLOCK channels; the `chunks` tiles of
an image, of all images in turn, are the units of a block of channels. A pass that sums has P programs per block, each
of which takes every P-th unit, so that all march through memory together. What each finds is a row of partial results:
forward means, sums of squared deviations and a count, backward two sums, `pitch` values after the row before. Rows are
put together in a fixed order: with FINISH by the last programs of the same launch, which saves the host one, otherwise
by a second kernel. Then of each `group` of a block's programs the last one puts the group's rows together, into a row
behind those of all programs, and the last of those puts these together. Statistics are float32: mean and biased
variance.

A packet is what a process tells others: forward such a row, backward the sums of the gradient, of it times the
normalised input, and a count; [2C + 1] in both directions.

S is given as `steps` of ALIGN positions, so that loads are as wide as it allows where positions are contiguous.

MASK says what ReLU let through: 0 everything (there is none), 1 where its argument, computed again, is positive (there
is no addend), 2 where the output is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._arrival import arrives_last
from .._launch import kernel

# Numbers that differ from shape to shape and would have kernels compiled anew for being 1 or a multiple of 16, which of
# all numbers only that of channels need be known for.
COUNTS = ["steps", "chunks", "units", "channel_blocks"]


@triton.jit
def _tile(
    unit,
    block,
    steps,
    channels,
    chunks,
    units,
    LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    R: tl.constexpr,
    C_BLOCK: tl.constexpr,
):
    """Where the elements of a tile lie, [R, C_BLOCK], which of them exist, and its number of positions."""
    positions = steps * ALIGN
    image = unit // chunks
    first = (unit % chunks).to(positions.dtype) * R
    row = tl.arange(0, R)[:, None]
    column = tl.arange(0, C_BLOCK)[None, :]
    rows = tl.where(unit < units, tl.minimum(positions - first, R), 0)
    begin = image.to(tl.int64) * positions * channels
    first_channel = (block * C_BLOCK).to(tl.int64)
    if LAST:
        offset = begin + first.to(tl.int64) * channels + first_channel + (row * channels + column)
    else:
        offset = begin + first_channel * positions + first + (column.to(tl.int64) * positions + row)
    mask = (row < rows) & (block * C_BLOCK + column < channels)
    return offset, mask, rows


@triton.jit
def _parameter(pointer, channel, mask, PRESENT: tl.constexpr, absent: tl.constexpr):
    """Weights or biases of channels, or what stands for those that a norm does not have."""
    if PRESENT:
        values = tl.load(pointer + channel, mask, other=0.0).to(tl.float32)
    else:
        values = tl.full(channel.shape, absent, tl.float32)
    return values


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


@triton.jit
def _joined(rows, number, channel, inside, channels, pitch, P_BLOCK: tl.constexpr):
    """Mean and sum of squared deviations of every channel over `number` rows, and how many values they are of.

    P_BLOCK rows at a time, around the mean of these, then by Chan's formula. Rows may be of no values, and if all are
    so is the result.
    """
    centre = tl.zeros(channel.shape, tl.float32)
    sum_of_squares = tl.zeros(channel.shape, tl.float32)
    values = 0.0
    for first in range(0, number, P_BLOCK):
        part = first + tl.arange(0, P_BLOCK)
        mask = (part < number)[:, None] & inside[None, :]
        begin = rows + part.to(tl.int64) * pitch
        count = tl.load(begin + 2 * channels, part < number, other=0.0, cache_modifier=".cg")
        found = begin[:, None] + channel[None, :]
        means = tl.load(found, mask, other=0.0, cache_modifier=".cg")
        deviations = tl.load(found + channels, mask, other=0.0, cache_modifier=".cg")
        here = tl.sum(count, 0)
        mean_here = tl.sum(count[:, None] * means, 0) / tl.maximum(here, 1.0)
        away = means - mean_here[None, :]
        squares_here = tl.sum(deviations + count[:, None] * away * away, 0)
        shift = mean_here - centre
        share = here / tl.maximum(values + here, 1.0)
        centre += shift * share
        sum_of_squares += squares_here + shift * shift * (values * share)
        values += here
    return centre, sum_of_squares, values


@triton.jit
def _store_statistics(
    mean,
    variance,
    running_mean,
    running_variance,
    channel,
    inside,
    channels,
    centre,
    sum_of_squares,
    values,
    momentum,
    RUNNING: tl.constexpr,
    PACKET: tl.constexpr,
):
    """Statistics, and what they do to the running ones, which stay if there are no values.

    With PACKET, `mean` is one, and gets everything.
    """
    count = tl.maximum(values, 1.0)
    tl.store(mean + channel, centre, inside)
    if PACKET:
        tl.store(mean + channels + channel, sum_of_squares, inside)
        tl.store(mean + 2 * channels + channel, values, channel == 0)
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
@triton.jit(do_not_specialize=[*COUNTS, "programs", "group"])
def batch_norm_measure(
    x,
    partials,
    tickets,
    mean,
    variance,
    running_mean,
    running_variance,
    steps,
    channels,
    chunks,
    units,
    programs,
    channel_blocks,
    pitch,
    group,
    momentum,
    LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    R: tl.constexpr,
    C_BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    FINISH: tl.constexpr,
    RUNNING: tl.constexpr,
    PACKET: tl.constexpr,
    P_BLOCK: tl.constexpr,
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
    offset, mask, _rows = _tile(first, block, steps, channels, chunks, units, LAST, ALIGN, R, C_BLOCK)
    pivot = tl.load(x + offset, mask, other=0.0)
    total = tl.zeros((R, C_BLOCK), tl.float32)
    squares = tl.zeros((R, C_BLOCK), tl.float32)
    counts = tl.zeros((R,), tl.float32)
    for start in tl.range(program, units, programs * UNROLL):
        for step in tl.static_range(UNROLL):
            offset, mask, rows = _tile(
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
    own_mean = tl.sum(means * counts[:, None], 0) / number
    away = means - own_mean[None, :]
    deviations = tl.sum(tl.maximum(squares - total * shift, 0.0) + counts[:, None] * away * away, 0)
    found = partials + program.to(tl.int64) * pitch
    tl.store(found + channel, base + own_mean, inside)
    tl.store(found + channels + channel, deviations, inside)
    # By all blocks alike, so that each sees it in time.
    tl.store(found + 2 * channels, number)
    if FINISH:
        groups = tl.cdiv(programs, group)
        own_group = program // group
        members = tl.minimum(group, programs - own_group * group)
        own_tickets = tickets + block * (1 + groups)
        if arrives_last(own_tickets + 1 + own_group, members):
            rows_of_group = partials + (own_group * group).to(tl.int64) * pitch
            rows_of_groups = partials + tl.cast(programs, tl.int64) * pitch
            centre, sum_of_squares, values = _joined(rows_of_group, members, channel, inside, channels, pitch, P_BLOCK)
            joined = rows_of_groups + own_group.to(tl.int64) * pitch
            tl.store(joined + channel, centre, inside)
            tl.store(joined + channels + channel, sum_of_squares, inside)
            tl.store(joined + 2 * channels, values)
            if arrives_last(own_tickets, groups):
                centre, sum_of_squares, values = _joined(
                    rows_of_groups, groups, channel, inside, channels, pitch, P_BLOCK
                )
                _store_statistics(
                    mean,
                    variance,
                    running_mean,
                    running_variance,
                    channel,
                    inside,
                    channels,
                    centre,
                    sum_of_squares,
                    values,
                    momentum,
                    RUNNING,
                    PACKET,
                )


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
    """Mean and variance of every channel from those of its parts, and what they do to the running ones."""
    channel = tl.program_id(0) * C_BLOCK + tl.arange(0, C_BLOCK)
    inside = channel < channels
    centre, sum_of_squares, values = _joined(partials, programs, channel, inside, channels, pitch, P_BLOCK)
    _store_statistics(
        mean,
        variance,
        running_mean,
        running_variance,
        channel,
        inside,
        channels,
        centre,
        sum_of_squares,
        values,
        momentum,
        RUNNING,
        PACKET,
    )


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
    offset, mask, _rows = _tile(unit, block, steps, channels, chunks, units, LAST, ALIGN, R, C_BLOCK)
    values = tl.load(x + offset, mask, other=0.0).to(tl.float32)
    centre = tl.load(mean + channel, inside, other=0.0).to(tl.float32)
    spread = tl.load(variance + channel, inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(spread + eps) * _parameter(weight, channel, inside, HAS_WEIGHT, 1.0)
    shift = _parameter(bias, channel, inside, HAS_BIAS, 0.0)
    result = (values - centre[None, :]) * scale[None, :] + shift[None, :]
    if HAS_Z:
        result += tl.load(z + offset, mask, other=0.0).to(tl.float32)
    if RELU:
        # A comparison that keeps NaN, as PyTorch's ReLU does.
        result = tl.where(result < 0.0, 0.0, result)
    tl.store(y + offset, result.to(y.dtype.element_ty), mask)


@triton.jit
def _summed(rows, number, channel, inside, channels, P_BLOCK: tl.constexpr):
    """Both sums of `number` rows."""
    first_sum = tl.zeros((P_BLOCK, channel.shape[0]), tl.float32)
    second_sum = tl.zeros((P_BLOCK, channel.shape[0]), tl.float32)
    for first in range(0, number, P_BLOCK):
        part = first + tl.arange(0, P_BLOCK)
        mask = (part < number)[:, None] & inside[None, :]
        found = rows + part.to(tl.int64)[:, None] * 2 * channels + channel[None, :]
        first_sum += tl.load(found, mask, other=0.0, cache_modifier=".cg")
        second_sum += tl.load(found + channels, mask, other=0.0, cache_modifier=".cg")
    return tl.sum(first_sum, 0), tl.sum(second_sum, 0)


@triton.jit
def _store_sums(plain, along, packet, channel, inside, channels, count, all_plain, all_along, PACKET: tl.constexpr):
    """The gradients of bias and weight, and with PACKET these and `count` once more, as a packet."""
    tl.store(plain + channel, all_plain, inside)
    tl.store(along + channel, all_along, inside)
    if PACKET:
        tl.store(packet + channel, all_plain, inside)
        tl.store(packet + channels + channel, all_along, inside)
        tl.store(packet + 2 * channels + channel, count, channel == 0)


@kernel
@triton.jit(do_not_specialize=[*COUNTS, "programs", "group"])
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
    tickets,
    all_plain,
    all_along,
    packet,
    steps,
    channels,
    chunks,
    units,
    programs,
    channel_blocks,
    group,
    eps,
    count,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MASK: tl.constexpr,
    WRITE_DZ: tl.constexpr,
    LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    R: tl.constexpr,
    C_BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    FINISH: tl.constexpr,
    PACKET: tl.constexpr,
    P_BLOCK: tl.constexpr,
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
    scale = factor * _parameter(weight, channel, inside, HAS_WEIGHT, 1.0)
    shift = _parameter(bias, channel, inside, HAS_BIAS, 0.0)
    plain = tl.zeros((R, C_BLOCK), tl.float32)
    along = tl.zeros((R, C_BLOCK), tl.float32)
    for start in tl.range(program, units, programs * UNROLL):
        for step in tl.static_range(UNROLL):
            offset, mask, _rows = _tile(
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
    if FINISH:
        groups = tl.cdiv(programs, group)
        own_group = program // group
        members = tl.minimum(group, programs - own_group * group)
        own_tickets = tickets + block * (1 + groups)
        if arrives_last(own_tickets + 1 + own_group, members):
            rows_of_group = partials + (own_group * group).to(tl.int64) * 2 * channels
            rows_of_groups = partials + tl.cast(programs, tl.int64) * 2 * channels
            group_plain, group_along = _summed(rows_of_group, members, channel, inside, channels, P_BLOCK)
            here = rows_of_groups + own_group.to(tl.int64) * 2 * channels + channel
            tl.store(here, group_plain, inside)
            tl.store(here + channels, group_along, inside)
            if arrives_last(own_tickets, groups):
                total, total_along = _summed(rows_of_groups, groups, channel, inside, channels, P_BLOCK)
                _store_sums(all_plain, all_along, packet, channel, inside, channels, count, total, total_along, PACKET)


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
    """Adds up what the programs of the pass before have found."""
    channel = tl.program_id(0) * C_BLOCK + tl.arange(0, C_BLOCK)
    inside = channel < channels
    all_plain, all_along = _summed(partials, programs, channel, inside, channels, P_BLOCK)
    _store_sums(plain, along, packet, channel, inside, channels, count, all_plain, all_along, PACKET)


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
    offset, mask, _rows = _tile(unit, block, steps, channels, chunks, units, LAST, ALIGN, R, C_BLOCK)
    gradient = tl.load(dy + offset, mask, other=0.0).to(tl.float32)
    values = gradient
    if BATCH or MASK == 1:
        values = tl.load(x + offset, mask, other=0.0).to(tl.float32)
    centre = tl.load(mean + channel, inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.load(variance + channel, inside, other=0.0).to(tl.float32) + eps)
    scale = factor * _parameter(weight, channel, inside, HAS_WEIGHT, 1.0)
    shift = _parameter(bias, channel, inside, HAS_BIAS, 0.0)
    gradient = _let_through(gradient, values, x, y, offset, mask, centre, scale, shift, MASK)
    if BATCH:
        if PACKET:
            along = plain + channels
            inverse_count = 1.0 / tl.maximum(tl.load(plain + 2 * channels), 1.0)
        mean_plain = tl.load(plain + channel, inside, other=0.0) * inverse_count
        mean_along = tl.load(along + channel, inside, other=0.0) * inverse_count * factor
        gradient -= mean_plain[None, :] + (values - centre[None, :]) * mean_along[None, :]
    tl.store(dx + offset, (gradient * scale[None, :]).to(dx.dtype.element_ty), mask)
