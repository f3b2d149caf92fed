"""Launch rules of batch norm: tiles and programs, and the limits below which PyTorch's operators run."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from .._device import DeviceFacts, launch_rule, next_power_of_2
from .._tuned import tunable

# Elements below which PyTorch's operators run. On an H200, 32 x 2048 x 7 x 7 values with ReLU take 24 and 24 us forward
# and backward with our kernels and 20 and 29 with PyTorch's operators, for which the host has less to do; 32 x 512 x 28
# x 28 take 37 and 47 beside 50 and 69.
NATIVE_BELOW = 1 << 22
# Elements below which PyTorch's operators run in compiled code. It is for graphs, where only the GPU's time counts: 16
# norms of a ResNet-50, at 64 images, lie between the limits. With kernels they take 0.08 ms less of a captured step
# than with Inductor's code, and the four norms of its shortcuts, which nothing follows, 0.07 less.
COMPILED_BELOW = 1 << 20
# Smallest number of positions of an image for which kernels are quicker for an eager, contiguous norm with nothing
# behind it: in half precision 32 x 256 x 56 x 56 take 49 and 81 us beside 110 and 173, but 32 x 512 x 28 x 28 32 and 52
# beside 27 and 38. If channels are contiguous both are about as quick. In float16 cuDNN keeps every multiprocessor busy
# if there are many channels: 10 x 512 x 48 x 48 take 22 and 33 beside 29 and 40 of ours, 33 x 128 x 64 x 64 92 and 203
# beside 36 and 52.
PLAIN_POSITIONS = 2048
PLAIN_CHANNELS = 384

# Elements of each tensor in a program's tile, by the kind of pass. On an H200, with 64 x 256 x 56 x 56 values in half
# precision, an elementwise pass takes 1.09 times the floor of its traffic forward (1.2 with 8192 if positions are
# contiguous) and 1.06 backward (1.2 with 8192). If positions are contiguous, a tile of few positions has many channels,
# and every thread loads their parameters: with 32 x 2048 x 7 x 7 smaller tiles take a quarter off.
APPLY_TILE = 2048
# In float32, channels last, 1 x 176 x 96 x 96 take 11.5 us backward with 1024 and 12.2 with 4096.
APPLY_BACKWARD_TILE = {False: 1024, True: 4096}  # whether channels are last, in half precision
WARPS = 4
# Tiles of the kernels that combine partial results, in elements: small, so that many programs share the work.
FINISH_TILE = 1024
FINISH_WARPS = 4
# The largest power of two that a kernel is told divides the contiguous size.
WIDEST = 16


class Pace(NamedTuple):
    """Launch choices of a pass that sums: elements of a tile, programs per multiprocessor, warps, and tiles in flight.

    `stages` tiles are loaded ahead to shared memory, or `unroll` tiles to registers. A pass keeps two sums per element
    of a tile, so tiles are small.
    """

    elements: int = 2048
    programs: int = 4
    num_warps: int = WARPS
    stages: int = 1
    unroll: int = 1


# Most values of a channel that one program holds, by whether channels are last, and the elements of a tile. Three
# launches that wait for each other take 8 to 14 us on an H200 however little there is to do: the gradients of
# bfloat16 1 x 200 x 14 x 14 took 10, with PyTorch's one launch 5. Tensors must be small: programs load one value at a
# time, and few bytes of a row if channels are last.
WHOLE = {False: 8192, True: 1024}
WHOLE_TILE, WHOLE_LAST_ELEMENTS = 8192, 1 << 20


class Geometry(NamedTuple):
    """Images, positions of each image, and channels, as they lie in memory. If channels are `last`, images is 1."""

    images: int
    positions: int
    channels: int
    last: bool


class Tiling(NamedTuple):
    """Division of a tensor into tiles, with the `sizes` and `constants` that every kernel takes (see kernels.py)."""

    units: int
    channel_blocks: int
    sizes: tuple[int, ...]
    constants: dict[str, Any]


def plain_by_kernels(positions: int, channels: int, dtype: torch.dtype) -> bool:
    """Return whether kernels should compute a norm with nothing behind it whose positions are contiguous."""
    return positions >= PLAIN_POSITIONS and (dtype != torch.float16 or channels < PLAIN_CHANNELS)


def held_whole(elements: int, channels: int, last: bool) -> bool:
    """Return whether one program can hold all values of a channel, so that a pass is one launch."""
    return elements // channels <= WHOLE[last] and elements <= (WHOLE_LAST_ELEMENTS if last else NATIVE_BELOW)


def whole_tiling(geometry: Geometry) -> tuple[tuple[int], tuple[int, int, int], dict[str, Any]]:
    """Return grid, sizes and constants of a launch that has one program for every block of channels."""
    images, positions, channels, last = geometry
    rows = next_power_of_2(images * positions)
    block = min(WHOLE_TILE // rows, 16, next_power_of_2(channels)) if last else 1
    warps = min(16, max(1, rows * block // 512))
    constants = {"LAST": last, "R": rows, "C_BLOCK": block, "num_warps": warps}
    return (-(-channels // block),), (images * positions, positions, channels), constants


@launch_rule
def tiling(geometry: Geometry, elements: int) -> Tiling:
    """Divide a tensor into tiles of at most `elements`, long along the dimension that is contiguous in memory."""
    images, positions, channels, last = geometry
    if last:
        # A width that divides the channels, because lanes beyond them would be idle.
        block = 128 if channels % 128 == 0 else min(64, next_power_of_2(channels))
        rows = min(elements // block, next_power_of_2(positions))
    else:
        rows = min(next_power_of_2(positions), 512)
        block = min(elements // rows, next_power_of_2(channels))
    chunks = -(-positions // rows)
    units, blocks = images * chunks, -(-channels // block)
    align = math.gcd(channels if last else positions, WIDEST)
    constants = {"LAST": last, "EVEN": positions % rows == 0, "ALIGN": align, "R": rows, "C_BLOCK": block}
    return Tiling(units, blocks, (positions, channels, chunks, units, blocks), constants)


class ApplyConfig(NamedTuple):
    """Launch choices of an elementwise pass: elements of a tile and warps."""

    elements: int
    num_warps: int


@tunable(lambda config: config._fields)
def apply_config(
    images: int, positions: int, channels: int, last: bool, backward: bool, element_size: int, device: DeviceFacts
) -> ApplyConfig:
    if last and element_size == 2 and channels == 64:
        # bfloat16 64x64x56x56: forward 33.6 (4 warps: 34.9), backward 44.5 (4096 elements by 4 warps: 48.0).
        return ApplyConfig(1024, 2) if backward else ApplyConfig(APPLY_TILE, 1)
    return ApplyConfig(APPLY_BACKWARD_TILE[last and element_size == 2] if backward else APPLY_TILE, WARPS)


@tunable(lambda pace: pace._fields)
def pace(
    images: int, positions: int, channels: int, last: bool, backward: bool, element_size: int, device: DeviceFacts
) -> Pace:
    """Return the launch choices for summing an input, or in the backward pass its gradients, of `element_size` bytes.

    While tiles are loaded to shared memory, the ones before are added: the statistics of the norms of a ResNet-50, 64
    images in bfloat16, take 0.40 ms; with loads to registers, which are all waited for, they took 0.49. Their gradients
    take 0.69 in place of 0.75, and float32 ones 0.15 in place of 0.19 for three norms. This needs at least 8 contiguous
    bytes. More programs or warps were slower throughout, because few warps with many elements each have less to
    combine: two of them take 48.1 us for the float32 gradients of 2 x 384 x 112 x 112, channels last, four take 50.1.
    """
    if (channels if last else positions) * element_size % 8:
        return Pace(unroll=2 if backward else 4)
    return Pace(num_warps=2 if last and (backward or element_size == 2) else WARPS, stages=3 if backward else 4)


def measure_programs(units: int, channel_blocks: int, multiprocessors: int, pace: Pace) -> int:
    """Return how many programs share the tiles of one block of channels; each has at least `unroll` tiles."""
    return max(1, min(-(-units // pace.unroll), pace.programs * multiprocessors // channel_blocks))


def pitch(channels: int) -> int:
    """Return the distance between the partial results of programs, which have two values per channel and a count."""
    return -(-(2 * channels + 1) // WIDEST) * WIDEST


@launch_rule
def finish_block(parts: int) -> tuple[int, int]:
    """Return how many partial results and channels a program of a combining kernel loads at a time.

    Each answer is a program to compile, in 0.25 s: with one per power of two a ResNet-50 needed five of each kernel.
    """
    together = 512 if parts > 128 else 64
    return together, FINISH_TILE // together
