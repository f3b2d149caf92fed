"""Max pooling of images whose channels are last in memory.

PyTorch saves an int64 per output and, backward, adds by atomics or searches windows: 64 images of a ResNet's stem,
64 x 112 x 112 in bfloat16, take it 221 us forward and 488 backward on an H200, in Inductor's code 94 and 366. Here one
byte is saved, the position in the window: 67 and 44 us.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import _library
from .._checks import check_floats, integer
from .._device import next_power_of_2
from .._op import Derivative, Kernels, Op, Saved
from . import reference

kernels = _library.LazyModule(f"{__package__}.kernels")

# The largest window whose positions fit into a byte.
LARGEST_WINDOW = 11
# Elements of an input below which PyTorch's operator runs, for which the host has less to do.
NATIVE_BELOW = 1 << 22
# Elements of a tile, forward and backward.
FORWARD_TILE, BACKWARD_TILE = 512, 1024


def max_pool2d(input: Tensor, kernel_size: int, stride: int | None = None, padding: int = 0) -> Tensor:
    """Return the largest value of each square window of [N, C, H, W], as `torch.nn.functional.max_pool2d` does.

    `stride`, by default the size of a window, and `padding` apply to both dimensions. Kernels take inputs in PyTorch's
    channels-last format and windows of up to 11 x 11 values; PyTorch's operator does the rest.
    """
    check_floats(input=input)
    window = integer("kernel_size", kernel_size)
    step, pad = window if stride is None else integer("stride", stride), integer("padding", padding)
    if input.dim() != 4:
        raise ValueError(f"input has shape {list(input.shape)}; images, four dimensions, are needed")
    if window < 1 or step < 1 or not 0 <= pad <= window // 2:
        raise ValueError(
            f"kernel_size={window}, stride={step}, padding={pad}; a size and a stride of at least 1 and a padding of "
            "at most half the kernel_size are needed"
        )
    height, width = input.shape[2:]
    fits = window <= min(LARGEST_WINDOW, height + 2 * pad, width + 2 * pad)
    # Under torch.vmap a tensor's memory layout is unknown.
    transformed = not torch.compiler.is_compiling() and _library.sees_operators_only()
    if not fits or transformed or not input.is_contiguous(memory_format=torch.channels_last):
        return functional.max_pool2d(input, window, step, pad)
    return MAX_POOL(input.permute(0, 2, 3, 1), window, step, pad, height, width).permute(0, 3, 1, 2)


def _empty(input: Tensor, window: int, stride: int, padding: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Allocate the outputs, one for each window, and their positions in the windows."""
    rows, columns = ((size + 2 * padding - window) // stride + 1 for size in (height, width))
    output = input.new_empty(input.shape[0], rows, columns, input.shape[3])
    return output, torch.empty_like(output, dtype=torch.int8)


def launch_forward(
    input: Tensor, window: int, stride: int, padding: int, height: int, width: int
) -> tuple[Tensor, Tensor]:
    output, index = _empty(input, window, stride, padding, height, width)
    images, rows, columns, channels = output.shape
    grid, tile = _cut(images, rows * columns, channels, FORWARD_TILE)
    sizes = (height, width, rows, columns, channels)
    kernels.max_pool_forward(
        grid, (input, output, index), sizes, K=window, S=stride, P=padding, R=tile[0], C_BLOCK=tile[1], num_warps=4
    )
    return output, index


def launch_backward(
    dy: Tensor, index: Tensor, window: int, stride: int, padding: int, height: int, width: int, *_: Any
) -> Tensor:
    images, rows, columns, channels = dy.shape
    dx = dy.new_empty(images, height, width, channels)
    # With stride 2, four values of the input are in the same windows, which are then read once for all four.
    together, first = (2, 0) if stride == 2 else (1, padding)
    positions = -(-(height + padding - first) // together) * -(-(width + padding - first) // together)
    grid, tile = _cut(images, positions, channels, BACKWARD_TILE)
    constants = {"K": window, "S": stride, "P": padding, "D": together, "R": tile[0], "C_BLOCK": tile[1]}
    sizes = (height, width, rows, columns, channels)
    kernels.max_pool_backward(grid, (dy, index, dx), sizes, **constants, num_warps=4)
    return dx


def _cut(images: int, positions: int, channels: int, elements: int) -> tuple[tuple[int], tuple[int, int]]:
    """Return the grid, and the positions and channels of a tile."""
    block = min(64, next_power_of_2(channels))
    rows = min(elements // block, next_power_of_2(positions))
    return (images * -(-positions // rows) * -(-channels // block),), (rows, block)


FAMILY = _library.register_family(
    _library.OpFamily(
        "max_pool",
        "max pooling of channels-last images, forward and backward",
        small_inputs=f"PyTorch's operator below {NATIVE_BELOW:,} elements",
    )
)

MAX_POOL = Op(
    FAMILY,
    "max_pool(Tensor input, int window, int stride, int padding, int height, int width) "
    "-> (Tensor output, Tensor index)",
    reference=reference.forward,
    kernels=Kernels(
        launch_forward,
        launch_backward,
        lambda input, *_: input.numel() >= NATIVE_BELOW or _library.requested == "triton",
    ),
    shapes=_empty,
    saved=Saved("index"),
    derivative=Derivative(
        backward=reference.backward,
        shapes=lambda dy, index, window, stride, padding, height, width, wanted: dy.new_empty(
            dy.shape[0], height, width, dy.shape[3]
        ),
    ),
)
