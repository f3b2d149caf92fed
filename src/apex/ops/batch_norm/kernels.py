"""Kernels of batch norm followed by an optional addend and ReLU, or by SiLU, in both memory layouts.

Legend: a tensor has I images of S positions and C channels, in memory [I, S, C] (LAST; then I is 1 and S counts the
positions of all images) or [I, C, S]. It is cut into tiles of R positions and C_BLOCK channels. Each image has `chunks`
tiles per block of channels; the tiles of all images in turn are the `units` of that block. A pass that sums has P
programs per block. Each takes every P-th unit, so that all advance through memory together, and writes a row of partial
results: forward means, sums of squared deviations and a count, `pitch` values after the row before; backward two sums,
2C values after it. A second kernel combines the rows in a fixed order: if the last programs of the pass did this, it
would take 6 to 10 us longer on an H200 for the 5 that the host saves. Statistics are float32: mean and biased variance.

Rank statistics, [2C + 1], are sent to other processes: forward a row of partial results, backward `sum_dy`,
`sum_dy_xhat` and a count. `sum_dy` is the sum of the gradient before the activation, and `sum_dy_xhat` the sum of this
gradient times the normalised input. ReLU's mask comes from the output. If the output is None (without an addend), the
mask is computed again from the input, as SiLU's slope always is. Absent tensors are None.

ALIGN, a power of two up to 16, divides the contiguous size, C or S: dividing and multiplying by ALIGN tells Triton how
wide loads may be. EVEN: R divides S, so that no tile has fewer positions. Passes that sum load STAGES tiles ahead to
shared memory, or UNROLL to registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._kernel_functions import parameter
from .._launch import kernel

# Numbers that differ from shape to shape. Triton would compile kernels anew if one is 1 or a multiple of 16; only the
# number of channels needs this specialisation.
COUNTS = ["positions", "chunks", "units", "channel_blocks"]


@triton.jit
def tile(
    unit, block, positions, channels, chunks,
    LAST: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, R: tl.constexpr, C_BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the offsets of a tile's elements, [R, C_BLOCK], their mask, and how many positions follow its first."""
    row = tl.arange(0, R)[:, None]
    column = tl.arange(0, C_BLOCK)[None, :]
    if LAST:
        channels = channels // ALIGN * ALIGN
        first = unit.to(positions.dtype) * R
        offset = first.to(tl.int64) * channels + block * C_BLOCK + (row * channels + column)
    else:
        positions = positions // ALIGN * ALIGN
        first = (unit % chunks).to(positions.dtype) * R
        begin = ((unit // chunks).to(tl.int64) * channels + block * C_BLOCK) * positions + first
        offset = begin + (column.to(tl.int64) * positions + row)
    mask = block * C_BLOCK + column < channels
    if not EVEN:
        mask = mask & (row < positions - first)
    return offset, mask, positions - first


@kernel
@triton.jit(do_not_specialize=[*COUNTS, "programs"])
def batch_norm_measure(
    x, partials,
    positions, channels, chunks, units, channel_blocks, programs, pitch,
    LAST: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, R: tl.constexpr, C_BLOCK: tl.constexpr,
    STAGES: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Compute mean and sum of squared deviations of every channel over a program's units, and the number of values.

    Every element of a tile has sums of its own, of differences from a pivot. The pivot is the channel's first value in
    the first tile, so that squares of differences from a distant mean cannot drown the variance. If all values are
    equal, the differences are 0 and the mean is exact.
    """
    program = tl.program_id(0) // channel_blocks
    block = tl.program_id(0) % channel_blocks
    channel = block * C_BLOCK + tl.arange(0, C_BLOCK)
    inside = channel < channels
    row = tl.arange(0, R)
    # Loaded separately: selecting the pivot from a tile by a sum over its rows took a fifth of the registers.
    unit = units - 1 - program
    if LAST:
        first = unit.to(tl.int64) * R * channels + channel
    else:
        first = ((unit // chunks).to(tl.int64) * channels + channel) * positions + (unit % chunks).to(tl.int64) * R
    pivot = tl.load(x + first, inside, other=0.0).to(tl.float32)
    total = tl.zeros((R, C_BLOCK), tl.float32)
    squares = tl.zeros((R, C_BLOCK), tl.float32)
    counts = tl.zeros((R,), tl.float32)
    filler = 0.0 if EVEN else tl.broadcast_to(pivot.to(x.dtype.element_ty)[None, :], (R, C_BLOCK))
    # The last tiles first, because they are still in the cache after the kernel that wrote the input.
    for start in tl.range(program, units, programs, num_stages=STAGES, loop_unroll_factor=UNROLL):
        offset, mask, rows = tile(units - 1 - start, block, positions, channels, chunks, LAST, EVEN, ALIGN, R, C_BLOCK)
        # Masked lanes load the pivot and contribute 0; with tl.where in place of `other` ptxas waits for load after
        # load.
        away = tl.load(x + offset, mask, other=filler).to(tl.float32) - pivot[None, :]
        total += away
        squares += away * away
        counts += 1.0 if EVEN else tl.where(row < rows, 1.0, 0.0)
    number = tl.sum(counts, 0)
    means = total * (1.0 / tl.maximum(counts, 1.0))[:, None]
    mean = tl.sum(total, 0) / number
    away = means - mean[None, :]
    deviations = tl.sum(tl.maximum(squares - total * means, 0.0) + counts[:, None] * away * away, 0)
    pointers = partials + program.to(tl.int64) * pitch
    tl.store(pointers + channel, pivot + mean, inside)
    tl.store(pointers + channels + channel, deviations, inside)
    tl.store(pointers + 2 * channels, number, mask=block == 0)


@kernel
@triton.jit(do_not_specialize=["programs"])
def batch_norm_statistics(
    partials, mean, variance, running_mean, running_variance, weight, bias, scale_shift,
    programs, channels, pitch, momentum, eps,
    P_BLOCK: tl.constexpr, C_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute mean and variance of every channel from partial results, and update the running statistics.

    Combines P_BLOCK parts at a time around their mean, then adds them by Chan's formula. Parts may be empty; if all
    are, statistics are 0 and the running ones stay. Without a `variance`, `mean` gets the rank statistics, [2C + 1].
    `scale_shift`, [2, C], gets the factor and the summand that normalise an input.
    """
    channel = tl.program_id(0) * C_BLOCK + tl.arange(0, C_BLOCK)
    inside = channel < channels
    # Values that are needed at the end are loaded first, so that a program waits for memory once.
    if running_mean is not None:
        old_mean = tl.load(running_mean + channel, inside, other=0.0).to(tl.float32)
        old_variance = tl.load(running_variance + channel, inside, other=0.0).to(tl.float32)
    if scale_shift is not None:
        scale = parameter(weight, channel, inside, 1.0)
        shift = parameter(bias, channel, inside, 0.0)
    centre = tl.zeros((C_BLOCK,), tl.float32)
    sum_of_squares = tl.zeros((C_BLOCK,), tl.float32)
    values = 0.0
    for first in range(0, programs, P_BLOCK):
        part = first + tl.arange(0, P_BLOCK)
        mask = (part < programs)[:, None] & inside[None, :]
        begin = partials + part.to(tl.int64) * pitch
        number = tl.load(begin + 2 * channels, part < programs, other=0.0)
        pointers = begin[:, None] + channel[None, :]
        means = tl.load(pointers, mask, other=0.0)
        deviations = tl.load(pointers + channels, mask, other=0.0)
        here = tl.sum(number, 0)
        mean_here = tl.sum(number[:, None] * means, 0) / tl.maximum(here, 1.0)
        away = means - mean_here[None, :]
        squares_here = tl.sum(deviations + number[:, None] * away * away, 0)
        away_here = mean_here - centre
        share = here / tl.maximum(values + here, 1.0)
        centre += away_here * share
        sum_of_squares += squares_here + away_here * away_here * (values * share)
        values += here
    count = tl.maximum(values, 1.0)
    tl.store(mean + channel, centre, inside)
    if variance is None:
        tl.store(mean + channels + channel, sum_of_squares, inside)
        tl.store(mean + 2 * channels, values, mask=tl.program_id(0) == 0)
    else:
        tl.store(variance + channel, sum_of_squares / count, inside)
    if running_mean is not None:
        share = momentum * tl.minimum(values, 1.0)
        new_mean = (1.0 - share) * old_mean + share * centre
        new_variance = (1.0 - share) * old_variance + share * (sum_of_squares / tl.maximum(count - 1.0, 1.0))
        tl.store(running_mean + channel, new_mean.to(running_mean.dtype.element_ty), inside)
        tl.store(running_variance + channel, new_variance.to(running_variance.dtype.element_ty), inside)
    if scale_shift is not None:
        scale *= tl.rsqrt(sum_of_squares / count + eps)
        tl.store(scale_shift + channel, scale, inside)
        tl.store(scale_shift + channels + channel, shift - centre * scale, inside)


@triton.jit
def active(values, ACTIVATION: tl.constexpr):
    """Return "relu" or "silu" of the values, or the values themselves for ""."""
    if ACTIVATION == "relu":
        # A comparison instead of a maximum keeps NaN, as PyTorch's ReLU does.
        values = tl.where(values < 0.0, 0.0, values)
    elif ACTIVATION == "silu":
        values = values / (1.0 + tl.exp(-values))
    return values


@kernel
@triton.jit(do_not_specialize=COUNTS)
def batch_norm_apply(
    x, z, weight, bias, mean, variance, y,
    positions, channels, chunks, units, channel_blocks, eps,
    ACTIVATION: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, R: tl.constexpr,
    C_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the output of one tile."""
    unit = tl.program_id(0) // channel_blocks
    block = tl.program_id(0) % channel_blocks
    channel = block * C_BLOCK + tl.arange(0, C_BLOCK)
    inside = channel < channels
    offset, mask, _rows = tile(unit, block, positions, channels, chunks, LAST, EVEN, ALIGN, R, C_BLOCK)
    values = tl.load(x + offset, mask, other=0.0).to(tl.float32)
    centre = tl.load(mean + channel, inside, other=0.0).to(tl.float32)
    spread = tl.load(variance + channel, inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(spread + eps) * parameter(weight, channel, inside, 1.0)
    shift = parameter(bias, channel, inside, 0.0)
    result = (values - centre[None, :]) * scale[None, :] + shift[None, :]
    if z is not None:
        result += tl.load(z + offset, mask, other=0.0).to(tl.float32)
    result = active(result, ACTIVATION)
    tl.store(y + offset, result.to(y.dtype.element_ty), mask)


@triton.jit
def _masked(gradient, away, x, y, offset, mask, scale, shift, ACTIVATION: tl.constexpr):
    """Return the gradient of the activation's argument, from its `gradient`. `away` is the input less its mean."""
    if ACTIVATION == "silu":
        before = away * scale[None, :] + shift[None, :]
        sigmoid = 1.0 / (1.0 + tl.exp(-before))
        gradient = gradient * sigmoid * (1.0 + before * (1.0 - sigmoid))
    elif ACTIVATION == "relu":
        if y is None:
            # Rounded like the output, because rounding may have made that 0.
            output = (away * scale[None, :] + shift[None, :]).to(x.dtype.element_ty)
        else:
            output = tl.load(y + offset, mask, other=0.0)
        gradient = tl.where(output.to(tl.float32) > 0.0, gradient, 0.0)
    return gradient


@kernel
@triton.jit(do_not_specialize=[*COUNTS, "programs"])
def batch_norm_measure_backward(
    x, dy, y, weight, bias, mean, variance, dz, partials,
    positions, channels, chunks, units, channel_blocks, programs, eps,
    ACTIVATION: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, R: tl.constexpr,
    C_BLOCK: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum the gradient, and the gradient times the normalised input, over a program's units.

    `dz`, the gradient of the addend, gets the gradient behind the ReLU mask.
    """
    program = tl.program_id(0) // channel_blocks
    block = tl.program_id(0) % channel_blocks
    channel = block * C_BLOCK + tl.arange(0, C_BLOCK)
    inside = channel < channels
    centre = tl.load(mean + channel, inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.load(variance + channel, inside, other=0.0).to(tl.float32) + eps)
    scale = factor * parameter(weight, channel, inside, 1.0)
    shift = parameter(bias, channel, inside, 0.0)
    sum_dy = tl.zeros((R, C_BLOCK), tl.float32)
    sum_dy_xhat = tl.zeros((R, C_BLOCK), tl.float32)
    for start in tl.range(program, units, programs, num_stages=STAGES, loop_unroll_factor=UNROLL):
        # The last tiles first, as in batch_norm_measure.
        offset, mask, _rows = tile(units - 1 - start, block, positions, channels, chunks, LAST, EVEN, ALIGN, R, C_BLOCK)
        away = tl.load(x + offset, mask, other=0.0).to(tl.float32) - centre[None, :]
        # Outside the input the loaded gradient is 0, and so is every term.
        gradient = tl.load(dy + offset, mask, other=0.0).to(tl.float32)
        gradient = _masked(gradient, away, x, y, offset, mask, scale, shift, ACTIVATION)
        if dz is not None:
            tl.store(dz + offset, gradient.to(dz.dtype.element_ty), mask)
        sum_dy += gradient
        sum_dy_xhat += gradient * away
    pointers = partials + program.to(tl.int64) * 2 * channels + channel
    tl.store(pointers, tl.sum(sum_dy, 0), inside)
    tl.store(pointers + channels, tl.sum(sum_dy_xhat, 0) * factor, inside)


@kernel
@triton.jit(do_not_specialize=["programs"])
def batch_norm_sums(
    partials, sum_dy, sum_dy_xhat, rank_stats,
    programs, channels, count,
    P_BLOCK: tl.constexpr, C_BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the partial results of `batch_norm_measure_backward`: the gradients of bias and weight.

    Also writes them to `rank_stats`, if given, followed by `count`.
    """
    channel = tl.program_id(0) * C_BLOCK + tl.arange(0, C_BLOCK)
    inside = channel < channels
    sums_dy = tl.zeros((P_BLOCK, C_BLOCK), tl.float32)
    sums_dy_xhat = tl.zeros((P_BLOCK, C_BLOCK), tl.float32)
    for first in range(0, programs, P_BLOCK):
        part = first + tl.arange(0, P_BLOCK)
        mask = (part < programs)[:, None] & inside[None, :]
        pointers = partials + part.to(tl.int64)[:, None] * 2 * channels + channel[None, :]
        sums_dy += tl.load(pointers, mask, other=0.0)
        sums_dy_xhat += tl.load(pointers + channels, mask, other=0.0)
    total_dy, total_dy_xhat = tl.sum(sums_dy, 0), tl.sum(sums_dy_xhat, 0)
    tl.store(sum_dy + channel, total_dy, inside)
    tl.store(sum_dy_xhat + channel, total_dy_xhat, inside)
    if rank_stats is not None:
        tl.store(rank_stats + channel, total_dy, inside)
        tl.store(rank_stats + channels + channel, total_dy_xhat, inside)
        tl.store(rank_stats + 2 * channels, count, mask=tl.program_id(0) == 0)


@kernel
@triton.jit(do_not_specialize=COUNTS)
def batch_norm_apply_backward(
    x, dy, y, weight, bias, mean, variance, sum_dy, sum_dy_xhat, dx,
    positions, channels, chunks, units, channel_blocks, eps, inverse_count,
    ACTIVATION: tl.constexpr, BATCH: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr,
    R: tl.constexpr, C_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one tile of the input; without BATCH the statistics did not depend on the input.

    Without `sum_dy_xhat`, `sum_dy` is the sum of all processes' rank statistics, [2C + 1], which has everything.
    """
    unit = tl.program_id(0) // channel_blocks
    block = tl.program_id(0) % channel_blocks
    channel = block * C_BLOCK + tl.arange(0, C_BLOCK)
    inside = channel < channels
    offset, mask, _rows = tile(unit, block, positions, channels, chunks, LAST, EVEN, ALIGN, R, C_BLOCK)
    gradient = tl.load(dy + offset, mask, other=0.0).to(tl.float32)
    centre = tl.load(mean + channel, inside, other=0.0).to(tl.float32)
    away = gradient
    if BATCH or (ACTIVATION != "" and y is None):
        away = tl.load(x + offset, mask, other=0.0).to(tl.float32) - centre[None, :]
    factor = tl.rsqrt(tl.load(variance + channel, inside, other=0.0).to(tl.float32) + eps)
    scale = factor * parameter(weight, channel, inside, 1.0)
    shift = parameter(bias, channel, inside, 0.0)
    gradient = _masked(gradient, away, x, y, offset, mask, scale, shift, ACTIVATION)
    if BATCH:
        if sum_dy_xhat is None:
            sum_dy_xhat = sum_dy + channels
            inverse_count = 1.0 / tl.maximum(tl.load(sum_dy + 2 * channels), 1.0)
        mean_dy = tl.load(sum_dy + channel, inside, other=0.0) * inverse_count
        mean_dy_xhat = tl.load(sum_dy_xhat + channel, inside, other=0.0) * inverse_count * factor
        gradient -= mean_dy[None, :] + away * mean_dy_xhat[None, :]
    tl.store(dx + offset, (gradient * scale[None, :]).to(dx.dtype.element_ty), mask)
