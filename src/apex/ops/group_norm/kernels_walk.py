"""Group norm where one program walks through a group in tiles of S_BLOCK positions, reading it twice.

For groups too large to be held at once in images too small for a launch to be worth its while: one launch takes the
place of three. Legend as in kernels.py.
"""

import triton
import triton.language as tl

from .._launch import kernel
from .kernels import add_up, aligned, finish, gradient_and_xhat, parameters


@triton.jit
def _group(
    positions, channels, groups, D: tl.constexpr, LAST: tl.constexpr, S_BLOCK: tl.constexpr, D_BLOCK: tl.constexpr
):
    """Of this program's group: where it begins, and for the elements of its first tile [S_BLOCK, D_BLOCK] their
    positions and where they lie from there; then the distance between two positions."""
    program = tl.program_id(0)
    row = tl.arange(0, S_BLOCK)[:, None]
    column = tl.arange(0, D_BLOCK)[None, :]
    image = (program // groups).to(tl.int64) * positions * channels
    first_channel = (program % groups) * D
    if LAST:
        begin = image + first_channel
        offset = row * channels + column
        step = channels
    else:
        begin = image + first_channel.to(tl.int64) * positions
        offset = column * positions + row
        step = 1
    return begin, row, column, offset, step


@kernel
@triton.jit
def group_norm_forward_walk(
    x, weight, bias, y, statistics,
    positions, channels, groups, eps,
    D: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, LAST: tl.constexpr,
    ALIGN: tl.constexpr, S_BLOCK: tl.constexpr, D_BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program per group of an image.

    Each place of a tile keeps mean and squared deviations of what it has seen (Welford's way); they are joined at the
    end, around the mean of all: as exact as reading the input once more.
    """
    positions, channels = aligned(positions, channels, LAST, ALIGN)
    begin, row, column, offset, step = _group(positions, channels, groups, D, LAST, S_BLOCK, D_BLOCK)
    means = tl.zeros((S_BLOCK, D_BLOCK), tl.float32)
    squares = tl.zeros((S_BLOCK, D_BLOCK), tl.float32)
    tiles = tl.cdiv(positions, S_BLOCK)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        mask = (tile * S_BLOCK + row < positions) & (column < D)
        values = tl.load(x + begin + (offset + tile * S_BLOCK * step), mask, other=0.0).to(tl.float32)
        away = tl.where(mask, values - means, 0.0)
        means += away * (1.0 / (tile + 1))
        squares += away * (values - means)
    seen = tl.where((row < positions) & (column < D), (positions - row + S_BLOCK - 1) // S_BLOCK, 0).to(tl.float32)
    count = 1.0 * positions * D
    mean = tl.sum(seen * means) / count
    variance = tl.sum(squares + seen * (means - mean) * (means - mean)) / count
    tl.store(statistics + tl.program_id(0) * 2, mean)
    tl.store(statistics + tl.program_id(0) * 2 + 1, variance)
    channel = (tl.program_id(0) % groups) * D + column
    factor = tl.rsqrt(variance + eps)
    scale, shift = parameters(weight, bias, channel, column < D, HAS_WEIGHT, HAS_BIAS)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        mask = (tile * S_BLOCK + row < positions) & (column < D)
        place = begin + (offset + tile * S_BLOCK * step)
        values = tl.load(x + place, mask, other=0.0).to(tl.float32)
        result = finish((values - mean) * factor, scale, shift, SILU)
        tl.store(y + place, result.to(y.dtype.element_ty), mask)


@kernel
@triton.jit
def group_norm_backward_walk(
    x, dy, weight, bias, statistics, dx, scratch, tickets, dweight, dbias,
    images, positions, channels, groups, eps,
    D: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, LAST: tl.constexpr,
    ALIGN: tl.constexpr, S_BLOCK: tl.constexpr, D_BLOCK: tl.constexpr, STAGES: tl.constexpr, ADD_UP: tl.constexpr,
):  # fmt: skip
    """One program per group of an image; fills the first part of `scratch`, and with ADD_UP writes the gradients of
    weight and bias."""
    positions, channels = aligned(positions, channels, LAST, ALIGN)
    begin, row, column, offset, step = _group(positions, channels, groups, D, LAST, S_BLOCK, D_BLOCK)
    program = tl.program_id(0)
    mean = tl.load(statistics + program * 2)
    factor = tl.rsqrt(tl.load(statistics + program * 2 + 1) + eps)
    first_channel = (program % groups) * D
    scale, shift = parameters(weight, bias, first_channel + column, column < D, HAS_WEIGHT, HAS_BIAS)
    sum_dy = tl.zeros((S_BLOCK, D_BLOCK), tl.float32)
    sum_dy_xhat = tl.zeros((S_BLOCK, D_BLOCK), tl.float32)
    tiles = tl.cdiv(positions, S_BLOCK)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        mask = (tile * S_BLOCK + row < positions) & (column < D)
        place = begin + (offset + tile * S_BLOCK * step)
        gradient, xhat = gradient_and_xhat(x, dy, place, mask, mean, factor, scale, shift, SILU)
        # Outside the group the gradient is 0, and so is every term.
        sum_dy += gradient
        sum_dy_xhat += gradient * xhat
    within = tl.arange(0, D_BLOCK)
    channel_dy = tl.sum(sum_dy, 0)
    channel_dy_xhat = tl.sum(sum_dy_xhat, 0)
    found = scratch + (program // groups).to(tl.int64) * 2 * channels + first_channel + within
    tl.store(found, channel_dy, within < D)
    tl.store(found + channels, channel_dy_xhat, within < D)
    weights, _ = parameters(weight, bias, first_channel + within, within < D, HAS_WEIGHT, HAS_BIAS)
    count = 1.0 * positions * D
    mean_dy = tl.sum(channel_dy * weights) / count
    mean_dy_xhat = tl.sum(channel_dy_xhat * weights) / count
    for tile in tl.range(0, tiles, num_stages=STAGES):
        mask = (tile * S_BLOCK + row < positions) & (column < D)
        place = begin + (offset + tile * S_BLOCK * step)
        gradient, xhat = gradient_and_xhat(x, dy, place, mask, mean, factor, scale, shift, SILU)
        result = factor * (gradient * scale - mean_dy - xhat * mean_dy_xhat)
        tl.store(dx + place, result.to(dx.dtype.element_ty), mask)
    if ADD_UP:
        add_up(scratch, tickets, dweight, dbias, images, channels, groups, D, HAS_WEIGHT, HAS_BIAS, D_BLOCK)
