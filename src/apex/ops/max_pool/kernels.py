"""Max pooling of [N, H, W, C] with square windows of K x K values, every S values, the images padded by P.

Positions of an image are counted row by row. A program has R positions and C_BLOCK channels of an image: forward of
the output, backward of the input, so that nothing is added by atomics. `index` says which of its window's values,
counted row by row, an output is.
"""

import triton
import triton.language as tl

from .._launch import kernel

SIZES = ["height", "width", "rows", "columns"]


@triton.jit
def _tile(positions, channels, R: tl.constexpr, C_BLOCK: tl.constexpr):
    """Image, positions [R, 1] and channels [1, C_BLOCK] of this program, and which of these exist."""
    tiles = tl.cdiv(positions, R)
    blocks = tl.cdiv(channels, C_BLOCK)
    program = tl.program_id(0)
    image = (program // (tiles * blocks)).to(tl.int64)
    position = (program // blocks % tiles) * R + tl.arange(0, R)[:, None]
    channel = (program % blocks) * C_BLOCK + tl.arange(0, C_BLOCK)[None, :]
    return image, position, channel, (position < positions) & (channel < channels)


@kernel
@triton.jit(do_not_specialize=SIZES)
def max_pool_forward(
    input, output, index,
    height, width, rows, columns, channels,
    K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, R: tl.constexpr, C_BLOCK: tl.constexpr,
):  # fmt: skip
    image, position, channel, exists = _tile(rows * columns, channels, R, C_BLOCK)
    first_row = position // columns * S - P
    first_column = position % columns * S - P
    begin = input + image * height * width * channels
    best = tl.full((R, C_BLOCK), float("-inf"), tl.float32)
    place = tl.full((R, C_BLOCK), -1, tl.int8)
    for k in tl.static_range(K * K):
        row = first_row + k // K
        column = first_column + k % K
        mask = exists & (row >= 0) & (row < height) & (column >= 0) & (column < width)
        offset = (row * width + column).to(tl.int64) * channels + channel
        value = tl.load(begin + offset, mask, other=float("-inf")).to(tl.float32)
        # The first of equal values, the last NaN: as PyTorch has it. Some place, even if all values are -inf.
        better = mask & ((value > best) | (value != value) | (place < 0))
        best = tl.where(better, value, best)
        place = tl.where(better, k, place).to(tl.int8)
    offset = (image * rows * columns + position) * channels + channel
    tl.store(output + offset, best.to(output.dtype.element_ty), exists)
    tl.store(index + offset, place, exists)


@kernel
@triton.jit(do_not_specialize=SIZES)
def max_pool_backward(
    dy, index, dx,
    height, width, rows, columns, channels,
    K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, R: tl.constexpr, C_BLOCK: tl.constexpr,
):  # fmt: skip
    """Every value asks the windows that it is in whether it was the largest."""
    image, position, channel, exists = _tile(height * width, channels, R, C_BLOCK)
    row = position // width + P
    column = position % width + P
    begin = image * rows * columns
    gradient = tl.zeros((R, C_BLOCK), tl.float32)
    for back_row in tl.static_range((K + S - 1) // S):
        for back_column in tl.static_range((K + S - 1) // S):
            out_row = row // S - back_row
            out_column = column // S - back_column
            in_row = row - out_row * S
            in_column = column - out_column * S
            mask = exists & (out_row >= 0) & (out_row < rows) & (out_column >= 0) & (out_column < columns)
            mask &= (in_row < K) & (in_column < K)
            offset = (begin + out_row * columns + out_column) * channels + channel
            is_largest = tl.load(index + offset, mask, other=-1) == in_row * K + in_column
            gradient += tl.where(is_largest, tl.load(dy + offset, mask, other=0.0).to(tl.float32), 0.0)
    offset = (image * height * width + position) * channels + channel
    tl.store(dx + offset, gradient.to(dx.dtype.element_ty), exists)
