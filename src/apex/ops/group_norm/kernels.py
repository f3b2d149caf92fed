"""Kernels of group norm in both layouts, with or without SiLU behind it.

Legend: an input has N images of S positions and C channels, in memory [N, S, C] (LAST) or [N, C, S]; G groups have
D = C / G channels each. Statistics are float32 [N, G, 2], mean and variance. One program takes a small group. A
larger group is cut into chunks of R positions: every program takes a tile of R positions and some channels, so that it
reads whole lines of memory however few channels a group has. A second kernel combines the tiles' results per channel,
and a third finishes the tiles.

The backward kernels share one float32 buffer, `scratch`: first sums per image and channel [N, 2, C], whose sums over
the images are the gradients of bias and weight; then means over groups [N, G, 2]; then tiles' sums [N, chunks, 2, C].

ALIGN, a power of two up to 16, divides the contiguous size, C or S: dividing and multiplying by ALIGN tells Triton how
wide loads may be.
"""

import triton
import triton.language as tl

from .._kernel_functions import is_last_block, parameter
from .._launch import kernel


@triton.jit
def _aligned(positions, channels, LAST: tl.constexpr, ALIGN: tl.constexpr):
    """Return `positions` and `channels`, with the contiguous size marked as a multiple of ALIGN."""
    if LAST:
        channels = channels // ALIGN * ALIGN
    else:
        positions = positions // ALIGN * ALIGN
    return positions, channels


@triton.jit
def _tile(positions, channels, chunks, LAST: tl.constexpr, ALIGN: tl.constexpr, R: tl.constexpr, C_BLOCK: tl.constexpr):
    """Return this program's tile: image, first position, channels [C_BLOCK] and their mask, elements' mask and offsets.

    The last two are [R, C_BLOCK].
    The beginning of the tile is a 64-bit offset; offsets within it are 32-bit.
    """
    positions, channels = _aligned(positions, channels, LAST, ALIGN)
    program = tl.program_id(0)
    image = program // chunks
    first = (program % chunks) * R
    channel = tl.program_id(1) * C_BLOCK + tl.arange(0, C_BLOCK)
    inside = channel < channels
    row = tl.arange(0, R)[:, None]
    column = tl.arange(0, C_BLOCK)[None, :]
    mask = (first + row < positions) & inside[None, :]
    begin = image.to(tl.int64) * positions * channels
    first_channel = (tl.program_id(1) * C_BLOCK).to(tl.int64)
    if LAST:
        offset = begin + first.to(tl.int64) * channels + first_channel + (row * channels + column)
    else:
        offset = begin + first_channel * positions + first + (column * positions + row)
    return image, first, channel, inside, mask, offset


@triton.jit
def _statistics(statistics, image, groups, channel, inside, eps, D: tl.constexpr):
    """Return mean and reciprocal deviation of the group of each channel."""
    pointers = statistics + (image * groups + channel // D) * 2
    mean = tl.load(pointers, inside, other=0.0)
    return mean, tl.rsqrt(tl.load(pointers + 1, inside, other=0.0) + eps)


@triton.jit
def _finish(normalised, weight, bias, SILU: tl.constexpr):
    z = normalised * weight + bias
    if SILU:
        z = z / (1.0 + tl.exp(-z))
    return z


@triton.jit
def _parameters(weight, bias, channel, mask):
    """Return the weights and biases of channels."""
    return parameter(weight, channel, mask, 1.0), parameter(bias, channel, mask, 0.0)


@triton.jit
def _gradient_and_xhat(x, dy, offset, mask, mean, factor, scale, shift, SILU: tl.constexpr):
    """Return the gradient before SiLU, zero outside of `mask`, and the normalised input."""
    values = tl.load(x + offset, mask, other=0.0).to(tl.float32)
    gradient = tl.load(dy + offset, mask, other=0.0).to(tl.float32)
    xhat = (values - mean) * factor
    if SILU:
        z = xhat * scale + shift
        sigmoid = 1.0 / (1.0 + tl.exp(-z))
        gradient = gradient * sigmoid * (1.0 + z * (1.0 - sigmoid))
    return gradient, xhat


@triton.jit
def _store_parameter_gradients(dweight, dbias, sum_dy, sum_dy_xhat, channel, mask):
    if dweight is not None:
        tl.store(dweight + channel, sum_dy_xhat.to(dweight.dtype.element_ty), mask)
    if dbias is not None:
        tl.store(dbias + channel, sum_dy.to(dbias.dtype.element_ty), mask)


@triton.jit
def _sum_pairs(pairs, count, channels, column, inside, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the column sums of pairs[:, 0] and of pairs[:, 1]; `pairs` is [count, 2, channels]."""
    sum_dy = tl.zeros((ROWS, COLUMNS), tl.float32)
    sum_dy_xhat = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        mask = (row < count) & inside[None, :]
        pointers = pairs + row.to(tl.int64) * 2 * channels + column[None, :]
        sum_dy += tl.load(pointers, mask, other=0.0)
        sum_dy_xhat += tl.load(pointers + channels, mask, other=0.0)
    return tl.sum(sum_dy, 0), tl.sum(sum_dy_xhat, 0)


@triton.jit
def _add_up(scratch, tickets, dweight, dbias, images, channels, groups, D: tl.constexpr, D_BLOCK: tl.constexpr):
    """Sum the first part of `scratch` over the images, in the last program of each group.

    Ends a kernel with one program per group of an image, where each program has stored its own sums in `scratch`.
    """
    group = tl.program_id(0) % groups
    if is_last_block(tickets + group, images):
        within = tl.arange(0, D_BLOCK)
        sum_dy = tl.zeros((D_BLOCK,), tl.float32)
        sum_dy_xhat = tl.zeros((D_BLOCK,), tl.float32)
        for image in range(images):
            pointers = scratch + tl.cast(image, tl.int64) * 2 * channels + group * D + within
            sum_dy += tl.load(pointers, within < D, other=0.0, cache_modifier=".cg")
            sum_dy_xhat += tl.load(pointers + channels, within < D, other=0.0, cache_modifier=".cg")
        channel = group * D + within
        _store_parameter_gradients(dweight, dbias, sum_dy, sum_dy_xhat, channel, within < D)


@kernel
@triton.jit
def group_norm_forward_small(
    x, weight, bias, y, statistics,
    images, positions, channels, groups, eps,
    D: tl.constexpr, SILU: tl.constexpr, LAST: tl.constexpr, ALIGN: tl.constexpr, S_BLOCK: tl.constexpr,
    D_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute output and statistics, one program per group of an image."""
    positions, channels = _aligned(positions, channels, LAST, ALIGN)
    program = tl.program_id(0)
    group = program % groups
    row = tl.arange(0, S_BLOCK)[:, None]
    column = tl.arange(0, D_BLOCK)[None, :]
    mask = (row < positions) & (column < D)
    start = (program // groups).to(tl.int64) * positions * channels
    offset = start + (row * channels + group * D + column if LAST else (group * D + column) * positions + row)
    values = tl.load(x + offset, mask, other=0.0).to(tl.float32)
    count = positions * D
    mean = tl.sum(values) / count
    centred = tl.where(mask, values - mean, 0.0)
    variance = tl.sum(centred * centred) / count
    tl.store(statistics + program * 2, mean)
    tl.store(statistics + program * 2 + 1, variance)
    channel = group * D + column
    scale, shift = _parameters(weight, bias, channel, column < D)
    result = _finish(centred * tl.rsqrt(variance + eps), scale, shift, SILU)
    tl.store(y + offset, result.to(y.dtype.element_ty), mask)


@kernel
@triton.jit
def group_norm_measure(
    x, partials,
    positions, channels, chunks,
    LAST: tl.constexpr, ALIGN: tl.constexpr, R: tl.constexpr, C_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute mean and sum of squared deviations of every channel of a tile; `partials` is [N, chunks, 2, C]."""
    _image, first, channel, inside, mask, offset = _tile(positions, channels, chunks, LAST, ALIGN, R, C_BLOCK)
    values = tl.load(x + offset, mask, other=0.0).to(tl.float32)
    mean = tl.sum(values, 0) / tl.minimum(positions - first, R)
    centred = tl.where(mask, values - mean[None, :], 0.0)
    pointers = partials + tl.program_id(0).to(tl.int64) * 2 * channels + channel
    tl.store(pointers, mean, inside)
    tl.store(pointers + channels, tl.sum(centred * centred, 0), inside)


@kernel
@triton.jit
def group_norm_statistics(
    partials, statistics,
    positions, channels, groups, chunks,
    D: tl.constexpr, R: tl.constexpr, CHUNK_BLOCK: tl.constexpr, D_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute mean and variance of a group from the chunks' statistics per channel; one program per group of an image.

    Makes two passes, the second around the mean from the first: as exact as reading the input twice.
    """
    program = tl.program_id(0)
    column = tl.arange(0, D_BLOCK)[None, :]
    start = (program // groups).to(tl.int64) * chunks * 2 * channels + (program % groups) * D
    total = tl.zeros((CHUNK_BLOCK, D_BLOCK), tl.float32)
    for first in range(0, chunks, CHUNK_BLOCK):
        chunk = first + tl.arange(0, CHUNK_BLOCK)[:, None]
        mask = (chunk < chunks) & (column < D)
        rows = tl.minimum(positions - chunk * R, R).to(tl.float32)
        means = tl.load(partials + start + chunk.to(tl.int64) * 2 * channels + column, mask, other=0.0)
        total += tl.where(mask, rows * means, 0.0)
    count = 1.0 * positions * D
    mean = tl.sum(total) / count
    squares = tl.zeros((CHUNK_BLOCK, D_BLOCK), tl.float32)
    for first in range(0, chunks, CHUNK_BLOCK):
        chunk = first + tl.arange(0, CHUNK_BLOCK)[:, None]
        mask = (chunk < chunks) & (column < D)
        rows = tl.minimum(positions - chunk * R, R).to(tl.float32)
        pointers = partials + start + chunk.to(tl.int64) * 2 * channels + column
        away = tl.load(pointers, mask, other=0.0) - mean
        squares += tl.where(mask, tl.load(pointers + channels, mask, other=0.0) + rows * away * away, 0.0)
    tl.store(statistics + program * 2, mean)
    tl.store(statistics + program * 2 + 1, tl.sum(squares) / count)


@kernel
@triton.jit
def group_norm_apply(
    x, weight, bias, statistics, y,
    positions, channels, groups, chunks, eps,
    D: tl.constexpr, SILU: tl.constexpr, LAST: tl.constexpr, ALIGN: tl.constexpr, R: tl.constexpr,
    C_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the output of one tile."""
    image, _first, channel, inside, mask, offset = _tile(positions, channels, chunks, LAST, ALIGN, R, C_BLOCK)
    values = tl.load(x + offset, mask, other=0.0).to(tl.float32)
    mean, factor = _statistics(statistics, image, groups, channel, inside, eps, D)
    scale, shift = _parameters(weight, bias, channel, inside)
    result = _finish((values - mean[None, :]) * factor[None, :], scale[None, :], shift[None, :], SILU)
    tl.store(y + offset, result.to(y.dtype.element_ty), mask)


@kernel
@triton.jit
def group_norm_backward_small(
    x, dy, weight, bias, statistics, dx, scratch, tickets, dweight, dbias,
    images, positions, channels, groups, eps,
    D: tl.constexpr, SILU: tl.constexpr, LAST: tl.constexpr, ALIGN: tl.constexpr, S_BLOCK: tl.constexpr,
    D_BLOCK: tl.constexpr, ADD_UP: tl.constexpr,
):  # fmt: skip
    """Compute the input's gradient and the sums in the first part of `scratch`, one program per group of an image.

    With ADD_UP it also writes the gradients of weight and bias.
    """
    positions, channels = _aligned(positions, channels, LAST, ALIGN)
    program = tl.program_id(0)
    image = (program // groups).to(tl.int64)
    group = program % groups
    row = tl.arange(0, S_BLOCK)[:, None]
    within = tl.arange(0, D_BLOCK)
    column = within[None, :]
    mask = (row < positions) & (column < D)
    scale, shift = _parameters(weight, bias, group * D + column, column < D)
    start = image * positions * channels
    offset = start + (row * channels + group * D + column if LAST else (group * D + column) * positions + row)
    mean = tl.load(statistics + program * 2)
    factor = tl.rsqrt(tl.load(statistics + program * 2 + 1) + eps)
    # Outside the group the loaded gradient is 0, and so is every term.
    gradient, xhat = _gradient_and_xhat(x, dy, offset, mask, mean, factor, scale, shift, SILU)
    # These sums first: threads that keep both tensors until the end spill 1056 bytes.
    sums = scratch + image * 2 * channels + group * D + within
    tl.store(sums, tl.sum(gradient, 0), within < D)
    tl.store(sums + channels, tl.sum(gradient * xhat, 0), within < D)
    scaled = gradient * scale
    count = positions * D
    mean_dy_xhat = tl.sum(scaled * xhat) / count
    result = factor * (scaled - tl.sum(scaled) / count - xhat * mean_dy_xhat)
    tl.store(dx + offset, result.to(dx.dtype.element_ty), mask)
    if ADD_UP:
        _add_up(scratch, tickets, dweight, dbias, images, channels, groups, D, D_BLOCK)


@kernel
@triton.jit
def group_norm_backward_tile(
    x, dy, weight, bias, statistics, scratch, dx,
    images, positions, channels, groups, chunks, eps,
    D: tl.constexpr, SILU: tl.constexpr, LAST: tl.constexpr, ALIGN: tl.constexpr, R: tl.constexpr,
    C_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one tile of the input.

    Without `dx`, compute the sums that this needs from all tiles instead: the gradient, and the gradient times the
    normalised input, per channel of a tile, in part 3 of `scratch`.
    """
    image, _first, channel, inside, mask, offset = _tile(positions, channels, chunks, LAST, ALIGN, R, C_BLOCK)
    mean, factor = _statistics(statistics, image, groups, channel, inside, eps, D)
    scale, shift = _parameters(weight, bias, channel, inside)
    mean, factor, scale, shift = mean[None, :], factor[None, :], scale[None, :], shift[None, :]
    gradient, xhat = _gradient_and_xhat(x, dy, offset, mask, mean, factor, scale, shift, SILU)
    means = scratch + tl.cast(images, tl.int64) * 2 * channels
    if dx is None:
        # Outside the input the loaded gradient is 0, and so is every term.
        pointers = means + images * 2 * groups + tl.program_id(0).to(tl.int64) * 2 * channels + channel
        tl.store(pointers, tl.sum(gradient, 0), inside)
        tl.store(pointers + channels, tl.sum(gradient * xhat, 0), inside)
    else:
        means += (image * groups + channel // D) * 2
        mean_dy = tl.load(means, inside, other=0.0)[None, :]
        mean_dy_xhat = tl.load(means + 1, inside, other=0.0)[None, :]
        result = factor * (gradient * scale - mean_dy - xhat * mean_dy_xhat)
        tl.store(dx + offset, result.to(dx.dtype.element_ty), mask)


@kernel
@triton.jit
def group_norm_sums(
    scratch, weight,
    images, positions, channels, groups, chunks,
    D: tl.constexpr, CHUNK_BLOCK: tl.constexpr, D_BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the chunks' results per channel, and compute their means over a group; one program per group of an image."""
    program = tl.program_id(0)
    image = program // groups
    group = program % groups
    within = tl.arange(0, D_BLOCK)
    means = scratch + tl.cast(images, tl.int64) * 2 * channels
    partials = means + images * 2 * groups + image.to(tl.int64) * chunks * 2 * channels + group * D
    channel_dy, channel_dy_xhat = _sum_pairs(partials, chunks, channels, within, within < D, CHUNK_BLOCK, D_BLOCK)
    sums = scratch + image.to(tl.int64) * 2 * channels + group * D + within
    tl.store(sums, channel_dy, within < D)
    tl.store(sums + channels, channel_dy_xhat, within < D)
    scale = parameter(weight, group * D + within, within < D, 1.0)
    count = 1.0 * positions * D
    tl.store(means + program * 2, tl.sum(channel_dy * scale) / count)
    tl.store(means + program * 2 + 1, tl.sum(channel_dy_xhat * scale) / count)


@kernel
@triton.jit
def group_norm_parameter_gradients(
    scratch, dweight, dbias,
    images, channels,
    N_BLOCK: tl.constexpr, C_BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the first part of `scratch` over the images: the gradients of bias and weight."""
    channel = tl.program_id(0) * C_BLOCK + tl.arange(0, C_BLOCK)
    inside = channel < channels
    sum_dy, sum_dy_xhat = _sum_pairs(scratch, images, channels, channel, inside, N_BLOCK, C_BLOCK)
    _store_parameter_gradients(dweight, dbias, sum_dy, sum_dy_xhat, channel, inside)
