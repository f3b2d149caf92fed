"""Launch rules of the dense layers, and the limits below which PyTorch's operators run; times are from an H200."""

from __future__ import annotations

from typing import NamedTuple

from .. import _device, _library

# Elements of a layer below which PyTorch's operators run with their own autograd, because the host is the limit. In
# microseconds, forward and backward: the perceptron 64x[256]*4 took 15 and 301 in our node, 22 and 354 as operators;
# 4096x[1024]*4 50 and 135 against 66 and 155; smaller ones were not measured. dense_gelu_dense 4096x1024x4096 (2^24
# elements) took 172 and 289 in our node, 128 and 294 as operators, 8192x1024x4096 (2^25) 227 and 452 against 233 and
# 476, 8192x4096x16384 (2^27) 3390 and 6780 against 3470 and 6870. Between the first two, from GPT-2 small's
# 8192x768x3072 on, our node saves one tensor of that size where PyTorch's operators save two.
SMALL = 1 << 14
SMALL_BETWEEN_LAYERS = 3 << 23  # elements between the layers of dense_gelu_dense

# Matrices with at most this many elements get a few programs with many rows each: float16 4096x1024 in 17.7 us,
# 4096x4096 in 41 (two launches: 16.4 and 38, but twice the host time, 30 us instead of 15).
SMALL_MATRIX = 1 << 24
FEW_ROWS, FEW_ODD_ROWS = 2048, 256

# 8192x16384 float16 in 131 us (4100 GB/s); 8192 elements per program: 134, PyTorch's operator: 157.
GELU_BLOCK = 2048


def is_large(elements: int, between_layers: bool = False) -> bool:
    """Return whether kernels take a layer with this many elements, of a perceptron or of dense_gelu_dense."""
    limit = SMALL_BETWEEN_LAYERS if between_layers else SMALL
    return elements >= limit or (elements > 0 and _library.requested == "triton")


def takes_node(rows: int, features: int, width: int) -> bool:
    """Return whether our autograd node takes dense_gelu_dense with `rows`, `features` and `width` between its layers.

    Its backward kernel writes gelu's output once more, while PyTorch's operators have saved it. This shows beside the
    products of few features: bfloat16 6965x22x4008 took 287 backward, PyTorch's 246. It also shows if the kernel
    cannot load eight bytes of a row at a time: 333 and 243 for 6965x22x4006, 767 and 717 for 16384x256x2049.
    """
    suits = width % 4 == 0 and 8 * features > width
    return is_large(rows * width, between_layers=True) and (suits or _library.requested == "triton")


class ActivationTile(NamedTuple):
    """Tiles of `rows` by `block` elements, `stages` in flight; up to `groups` programs share a block of columns."""

    rows: int
    block: int
    groups: int
    num_warps: int = 4
    stages: int = 1


def activation_tile(
    rows: int, columns: int, active: bool, element_size: int, device: _device.DeviceFacts
) -> ActivationTile:
    # If a program for every 16 columns keeps half of the device busy or ends soon, it takes all of their rows. This is
    # one launch without a sum of partial results, which counts where the host is the limit. Excluded are many rows of
    # float32 whose values are loaded singly: the gradients of 1038x[137, 300, 327, 141] took 170 so, PyTorch's 121.
    singly = element_size == 4 and columns % 4 != 0 and rows > FEW_ODD_ROWS
    is_wide = 2 * columns >= 15 * device.multiprocessors
    if (is_wide or rows <= FEW_ROWS) and rows * columns <= SMALL_MATRIX and not singly:
        return ActivationTile(min(256, max(16, _device.next_power_of_2(rows))), 16, 1, num_warps=8, stages=3)
    # If gelu's output is written too, tiles are narrow: bfloat16 8192x3072 in 62 us, 1.3 times the floor; 16 by 128:
    # 66.
    block = min(64 if active else 128, max(16, 1 << (columns - 1).bit_length()))
    column_blocks = -(-columns // block)
    # At most eight programs per multiprocessor, one wave: gelu float16 8192x16384 took 258 us in 1152 programs, where
    # 1056 have room, 1.36 times the floor (PyTorch's two operators: 275). But few enough groups that their sums are
    # added quickly: 64 if there are many columns. relu 4096x1024 takes 17 (PyTorch: 23), relu 512x512 8 (PyTorch: 16).
    wave = max(1, 8 * device.multiprocessors // column_blocks)
    groups = min(64 if column_blocks > 4 else 512, wave, -(-rows // 16))
    return ActivationTile(32 if active else 16, block, groups)


class ProductTile(NamedTuple):
    """Tile of a weight gradient, `out` by `into` elements, and the `rows` that are multiplied at a time."""

    out: int
    into: int
    rows: int
    num_warps: int
    num_stages: int


def product_tile(outs: int, ins: int, device: _device.DeviceFacts) -> ProductTile:
    # 8192x4096x4096 bfloat16 in 499 us (tiles of 128 by 128, masked: 781; PyTorch's product: 362).
    if device.backend == "interpreter" or min(outs, ins) < 256:
        return ProductTile(32, 32, 32, num_warps=4, num_stages=1)
    wide = device.shared_memory >= 160 * 1024
    return ProductTile(128, 256 if wide else 128, 64, num_warps=8, num_stages=2 if device.backend == "hip" else 3)
