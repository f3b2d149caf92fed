"""Max pooling kernels for [N, H, W, C] with square windows of K x K values, stride S and padding P.

Positions of an image are counted row by row. A program has R positions and C_BLOCK channels of an image: forward of
the output, backward of the input, so that no atomics are needed. `index` holds the position of each output's maximum
in its window, counted row by row.
"""

import triton
import triton.language as tl

from .._launch import kernel

SIZES = ["height", "width", "rows", "columns"]


@triton.jit
def _tile(positions, channels, R: tl.constexpr, C_BLOCK: tl.constexpr):
    """Return image, positions [R, 1] and channels [1, C_BLOCK] of this program, and their mask."""
    tiles = tl.cdiv(positions, R)
    blocks = tl.cdiv(channels, C_BLOCK)
    # The last tiles first: they are still in the cache after the kernel before, and the next kernel begins at the
    # first.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
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
    # The first of equal values and the last NaN win, as in PyTorch. If all are -inf, the first one inside the image
    # wins.
    winner = tl.maximum(-first_row, 0) * K + tl.maximum(-first_column, 0) + tl.zeros((R, C_BLOCK), tl.int32)
    for k in tl.static_range(K * K):
        row = first_row + k // K
        column = first_column + k % K
        mask = exists & (row >= 0) & (row < height) & (column >= 0) & (column < width)
        offset = (row * width + column).to(tl.int64) * channels + channel
        value = tl.load(begin + offset, mask, other=float("-inf")).to(tl.float32)
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        winner = tl.where(better, k, winner)
    offset = (image * rows * columns + position) * channels + channel
    tl.store(output + offset, best.to(output.dtype.element_ty), exists)
    tl.store(index + offset, winner.to(tl.int8), exists)


@triton.jit
def _share(value, winner, row, column, K: tl.constexpr):
    """Return the part of a window's gradient for the value in this row and column of the window."""
    return tl.where((winner == row * K + column) & (column < K), value, 0.0)


@kernel
@triton.jit(do_not_specialize=SIZES)
def max_pool_backward(
    dy, index, dx,
    height, width, rows, columns, channels,
    K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, D: tl.constexpr, R: tl.constexpr, C_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of each value: the sum over the windows that have it as their largest value.

    A position is one of D x D values, which with D = S = 2 are in the same windows; else D is 1.
    """
    first: tl.constexpr = P if D == 1 else 0
    across = tl.cdiv(width + P - first, D)
    image, position, channel, exists = _tile(tl.cdiv(height + P - first, D) * across, channels, R, C_BLOCK)
    row = (position // across + first) * D
    column = (position % across + first) * D
    begin = image * rows * columns
    gradient = tl.zeros((R, C_BLOCK), tl.float32)
    right, below, diagonal = gradient, gradient, gradient
    for back_row in tl.static_range((K + S - 1) // S):
        for back_column in tl.static_range((K + S - 1) // S):
            out_row = row // S - back_row
            out_column = column // S - back_column
            mask = exists & (out_row >= 0) & (out_row < rows) & (out_column >= 0) & (out_column < columns)
            offset = (begin + out_row * columns + out_column) * channels + channel
            winner = tl.load(index + offset, mask, other=-1).to(tl.int32)
            value = tl.load(dy + offset, mask, other=0.0).to(tl.float32)
            if D == 1:
                in_row = row % S + back_row * S
                gradient += _share(value, winner, in_row, column % S + back_column * S, K)
            else:
                gradient += _share(value, winner, back_row * S, back_column * S, K)
                if back_column * S + 1 < K:
                    right += _share(value, winner, back_row * S, back_column * S + 1, K)
                if back_row * S + 1 < K:
                    below += _share(value, winner, back_row * S + 1, back_column * S, K)
                    if back_column * S + 1 < K:
                        diagonal += _share(value, winner, back_row * S + 1, back_column * S + 1, K)
    row -= P
    column -= P
    offset = (image * height * width + row * width + column) * channels + channel
    here = exists & (row >= 0) & (row < height)
    tl.store(dx + offset, gradient.to(dx.dtype.element_ty), here & (column >= 0) & (column < width))
    if D == 2:
        next_row = exists & (row + 1 >= 0) & (row + 1 < height)
        next_column = (column + 1 >= 0) & (column + 1 < width)
        under = offset + width * channels
        tl.store(dx + offset + channels, right.to(dx.dtype.element_ty), here & next_column)
        tl.store(dx + under, below.to(dx.dtype.element_ty), next_row & (column >= 0) & (column < width))
        tl.store(dx + under + channels, diagonal.to(dx.dtype.element_ty), next_row & next_column)
