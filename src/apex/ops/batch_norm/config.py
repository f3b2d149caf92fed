"""How batch norms are cut into programs, and which of them are left to PyTorch's operators."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from .._device import DeviceFacts, launch_rule, next_power_of_2
from .._tuned import tunable

# Elements below which PyTorch's operators run. On an H200, 32 x 2048 x 7 x 7 values with ReLU take 24 and 24 us forward
# and backward with ours and 20 and 29 with PyTorch's, for which the host has less to do; 32 x 512 x 28 x 28 take 37 and
# 47 beside 50 and 69.
NATIVE_BELOW = 1 << 22
# The same in compiled code, which is for graphs, where the GPU's time alone counts: 16 norms of a ResNet-50, at 64
# images, lie between, and take 0.08 ms less of a captured step than by code of Inductor, and the four of its shortcuts,
# which nothing follows, 0.07 less.
COMPILED_BELOW = 1 << 20
# Positions of an image from which on an eager norm with nothing behind it is quicker by kernels, if contiguous: in
# half precision 32 x 256 x 56 x 56 take 49 and 81 us beside 110 and 173, but 32 x 512 x 28 x 28 32 and 52 beside 27 and
# 38. Where channels are contiguous it is about as quick. In float16 cuDNN keeps every multiprocessor busy if there are
# many channels: 10 x 512 x 48 x 48 take 22 and 33 beside 29 and 40 of ours, 33 x 128 x 64 x 64 92 and 203 beside 36 and
# 52.
PLAIN_POSITIONS = 2048
PLAIN_CHANNELS = 384

# Elements of each tensor that one program has in hand, by the kind of pass. On an H200, with 64 x 256 x 56 x 56 values
# in half precision, an elementwise pass takes 1.09 times the floor of its traffic forward (1.2 with 8192 if positions
# are contiguous) and 1.06 backward (1.2 with 8192). Where positions are contiguous a tile of few positions has many
# channels, whose parameters every thread loads: with 32 x 2048 x 7 x 7 smaller tiles take a quarter off.
APPLY_TILE = 2048
# In float32, channels last, 1 x 176 x 96 x 96 take 11.5 us backward with 1024 and 12.2 with 4096.
APPLY_BACKWARD_TILE = {False: 1024, True: 4096}  # whether channels are last, in half precision
WARPS = 4
# Kernels that put partial results together have tiles of so many elements: few, so that many programs share the work.
FINISH_TILE = 1024
FINISH_WARPS = 4
# The most values at once that lie side by side and that a kernel is compiled to know of.
WIDEST = 16


class Pace(NamedTuple):
    """A pass that sums: elements of a tile, programs per multiprocessor, warps, and tiles that are on their way.

    `stages` of these on their way to shared memory, or `unroll` to registers. A pass keeps two sums per element of a
    tile: small tiles.
    """

    elements: int = 2048
    programs: int = 4
    num_warps: int = WARPS
    stages: int = 1
    unroll: int = 1


# Values of a channel that one program holds, by whether channels are last, and the elements of a tile. Three launches,
# each of which waits for the one before, take 8 to 14 us on an H200 however little there is to do: the gradients of
# bfloat16 1 x 200 x 14 x 14 took 10, by PyTorch's one launch 5. Tensors must be small: programs load one value at a
# time, and few bytes of a row where channels are last.
WHOLE = {False: 8192, True: 1024}
WHOLE_TILE, WHOLE_LAST_ELEMENTS = 8192, 1 << 20


class Geometry(NamedTuple):
    """Images, positions of each and channels, as they lie in memory; images are one where channels are `last`."""

    images: int
    positions: int
    channels: int
    last: bool


class Tiling(NamedTuple):
    """How a tensor is cut into tiles; `sizes` and `constants`, by the kernels' legend, are what every kernel takes."""

    units: int
    channel_blocks: int
    sizes: tuple[int, ...]
    constants: dict[str, Any]


def plain_by_kernels(positions: int, channels: int, dtype: torch.dtype) -> bool:
    """Whether a norm with nothing behind it is for the kernels, where positions are contiguous."""
    return positions >= PLAIN_POSITIONS and (dtype != torch.float16 or channels < PLAIN_CHANNELS)


def held_whole(elements: int, channels: int, last: bool) -> bool:
    """Whether one program holds all values of a channel, so that one launch does a pass."""
    return elements // channels <= WHOLE[last] and elements <= (WHOLE_LAST_ELEMENTS if last else NATIVE_BELOW)


def whole_tiling(geometry: Geometry) -> tuple[tuple[int], tuple[int, int, int], dict[str, Any]]:
    """Grid, sizes and constants of a launch that has a program for every block of channels."""
    images, positions, channels, last = geometry
    rows = next_power_of_2(images * positions)
    block = min(WHOLE_TILE // rows, 16, next_power_of_2(channels)) if last else 1
    warps = min(16, max(1, rows * block // 512))
    constants = {"LAST": last, "R": rows, "C_BLOCK": block, "num_warps": warps}
    return (-(-channels // block),), (images * positions, positions, channels), constants


@launch_rule
def tiling(geometry: Geometry, elements: int) -> Tiling:
    """Tiles of at most `elements`, long where memory is contiguous: along the channels if those are last."""
    images, positions, channels, last = geometry
    if last:
        # As wide as divides the channels, because lanes beyond them are idle.
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
    """An elementwise pass: elements of a tile, warps."""

    elements: int
    num_warps: int


@tunable(lambda config: config._fields)
def apply_config(
    images: int, positions: int, channels: int, last: bool, backward: bool, element_size: int, device: DeviceFacts
) -> ApplyConfig:
    return ApplyConfig(APPLY_BACKWARD_TILE[last and element_size == 2] if backward else APPLY_TILE, WARPS)


@tunable(lambda pace: pace._fields)
def pace(
    images: int, positions: int, channels: int, last: bool, backward: bool, element_size: int, device: DeviceFacts
) -> Pace:
    """The pace at which an input, or in the backward pass its gradients, of `element_size` bytes are summed.

    While tiles are on their way to shared memory the ones before are added: the statistics of the norms of a ResNet-50,
    64 images in bfloat16, take 0.40 ms where loads to registers, all waited for, took 0.49, their gradients 0.69 in
    place of 0.75, and float32 ones 0.15 in place of 0.19 for three norms. Not below 8 bytes that lie side by side. More
    programs or warps were slower throughout, because few warps with many elements each have less to put together: two
    of them take 48.1 us for the float32 gradients of 2 x 384 x 112 x 112, channels last, where four take 50.1.
    """
    if (channels if last else positions) * element_size % 8:
        return Pace(unroll=2 if backward else 4)
    return Pace(num_warps=2 if last and (backward or element_size == 2) else WARPS, stages=3 if backward else 4)


def measure_programs(units: int, channel_blocks: int, multiprocessors: int, pace: Pace) -> int:
    """How many programs share the tiles of one block of channels: none has fewer than it takes at a time."""
    return max(1, min(-(-units // pace.unroll), pace.programs * multiprocessors // channel_blocks))


def pitch(channels: int) -> int:
    """How far apart the partial results of programs lie, which have two values per channel and a count."""
    return -(-(2 * channels + 1) // WIDEST) * WIDEST


@launch_rule
def finish_block(parts: int) -> tuple[int, int]:
    """Partial results and channels that a program has in hand which puts results together."""
    together = min(FINISH_TILE, next_power_of_2(parts))
    return together, min(128, FINISH_TILE // together)
