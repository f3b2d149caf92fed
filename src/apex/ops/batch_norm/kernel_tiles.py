"""Tiles of batch norms in both layouts, and what all kernels call things.

Legend: a tensor has I images of S positions and C channels, in memory [I, S, C] (LAST; then I is 1 and S counts the
positions of all images) or [I, C, S]. It is cut into tiles of R positions and C_BLOCK channels; the `chunks` tiles of
an image, of all images in turn, are the units of a block of channels. A pass that sums has P programs per block, each
of which takes every P-th unit, so that all march through memory together. What each finds is a row of partial results:
forward means, sums of squared deviations and a count, `pitch` values after the row before, backward two sums, 2C values
after it. A second kernel puts the rows together, in a fixed order: were this left to the last programs of the pass, it
would take 6 to 10 us longer on an H200 for the 5 that the host saves. Statistics are float32: mean and biased variance.

A packet is what a process tells others: forward such a row, backward the sums of the gradient, of it times the
normalised input, and a count; [2C + 1] in both directions.

S is given as `steps` of ALIGN positions, so that loads are as wide as it allows where positions are contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Numbers that differ from shape to shape and would have kernels compiled anew for being 1 or a multiple of 16, which of
# all numbers only that of channels need be known for.
COUNTS = ["steps", "chunks", "units", "channel_blocks"]


@triton.jit
def tile(
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
def parameter(pointer, channel, mask, PRESENT: tl.constexpr, absent: tl.constexpr):
    """Weights or biases of channels, or what stands for those that a norm does not have."""
    if PRESENT:
        values = tl.load(pointer + channel, mask, other=0.0).to(tl.float32)
    else:
        values = tl.full(channel.shape, absent, tl.float32)
    return values
