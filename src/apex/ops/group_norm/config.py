"""Launch rules of group norm: whether a program takes a whole group, and tiles of groups that are cut up."""

from __future__ import annotations

from typing import NamedTuple

from .._device import DeviceFacts, next_power_of_2
from .._tuned import tunable

# Most elements of a group, with sizes rounded up to powers of two, that one program holds. Times are in microseconds
# on an H200, in bfloat16, channels last: the gradients of 8x960x32x32, 32768 elements a group, took 143 held at once
# and 55 in tiles.
SMALL_GROUP = {"forward": 32768, "backward": 16384}
# If channels are last, a program reads one group alone if at least GROUP_BYTES of it are contiguous, or if it has
# 1/n of them and the tensor at most SCATTERED / n elements. Groups of one channel of 47x32x96x96 took 179 forward that
# way; in tiles they take as long as groups of many channels.
GROUP_BYTES, SCATTERED = 16, 1 << 22
# Elements of a group, with sizes rounded up to powers of two, that one program holds in the forward pass if channels
# are last and their number in a group is odd: every value is then loaded singly. float32 47x112x48x48, with 32768
# elements a group of 7 channels, took 264; 48x48x56x56, of 6, takes 52, 4x416x28x28, 16384 elements of 13, 11. Cut up,
# bfloat16 2x808x48x48, of 101 channels, takes 24.
ODD_GROUP = 16384
# Elements of each tensor that one program holds if groups are cut up, and its warps. 8x2560x64x64: forward 211
# against 240 to 310 for other sizes if channels are last, 139 against 165 if they are not; backward 351 against
# 385 to 607, and 236 against 252.
FORWARD_TILE = {True: 8192, False: 4096}
FORWARD_WARPS = 4
# Half-precision tensors of at most this many elements, channels last, take half that tile and half the warps forward:
# 8x320x64x64 takes 31.3 (else 34.9), 4x960x64x64 41.2 (47.1).
SMALL_CUT = 1 << 24
BACKWARD_TILE = 2048
BACKWARD_WARPS = 2
# For the kernels that sum the results of tiles: chunks at a time, warps, and images and channels at a time.
CHUNK_BLOCK = 32
SUM_WARPS = 4
PARAMETER_BLOCK = (16, 64)


def groups_apart(elements: int, group_bytes: int, last: bool) -> bool:
    """Return whether each group may have its own program: not if it would use little of each fetched cache line."""
    return not last or group_bytes >= GROUP_BYTES or elements * (GROUP_BYTES // group_bytes) <= SCATTERED


def held_forward(positions: int, group_channels: int, last: bool) -> bool:
    """Return whether one program may take a group in the forward pass, judged by the width of its loads."""
    elements = next_power_of_2(positions) * next_power_of_2(group_channels)
    return not last or group_channels % 2 == 0 or elements <= ODD_GROUP


class GroupConfig(NamedTuple):
    """Launch choices for one program per group of an image, which holds the whole group."""

    position_block: int
    channel_block: int
    num_warps: int


@tunable(lambda config: ("num_warps",))
def small_config(
    positions: int, group_channels: int, direction: str, element_size: int, device: DeviceFacts
) -> GroupConfig | None:
    """Return the configuration for a group held by one program; None if the group is too large."""
    position_block, channel_block = next_power_of_2(positions), next_power_of_2(group_channels)
    elements = position_block * channel_block
    if elements > SMALL_GROUP[direction]:
        return None
    # 32 elements per thread, but 16 for small gradients: with silu bfloat16 3x96x16x16 in 9.1 (32: 16.3, 8: 8.5),
    # 1x152x7x7 in 10.0 (14.1, 6.7), 112x128x16x16 in 20.1 (21.9, 20.9), float16 55x832x8x8 in 20.9 (20.4, 23.7).
    per_warp = 512 if direction == "backward" and elements <= 2048 else 1024
    return GroupConfig(position_block, channel_block, min(16, max(1, elements // per_warp)))


class CutConfig(NamedTuple):
    """Launch choices for groups that are cut up: elements of each tensor that one program holds, and its warps."""

    elements: int
    num_warps: int


@tunable(lambda config: config._fields)
def cut_config(
    images: int, positions: int, channels: int, last: bool, direction: str, element_size: int, device: DeviceFacts
) -> CutConfig:
    if direction == "forward":
        small = last and element_size == 2 and images * positions * channels <= SMALL_CUT
        return CutConfig(FORWARD_TILE[last] >> small, FORWARD_WARPS >> small)
    return CutConfig(BACKWARD_TILE, BACKWARD_WARPS)


class TileConfig(NamedTuple):
    """Tiles of `rows` positions and `channel_block` channels."""

    rows: int
    channel_block: int
    chunks: int
    channel_blocks: int


def tile_config(positions: int, channels: int, elements: int, last: bool) -> TileConfig:
    """Return tiles of at most `elements`, long in the contiguous dimension: the channels if they are `last`."""
    if last:
        # A width that divides the channels, because lanes beyond them would be idle.
        block = next((width for width in (128, 64) if channels % width == 0), min(64, next_power_of_2(channels)))
        rows = min(elements // block, next_power_of_2(positions))
    else:
        rows = min(next_power_of_2(positions), 1024)
        # Fewer channels if there are many positions: offsets within a tile are 32-bit numbers in the kernels.
        addressed = (2**31 - 1) // positions
        block = min(elements // rows, next_power_of_2(channels), 1 << (addressed.bit_length() - 1))
    return TileConfig(rows, block, -(-positions // rows), -(-channels // block))
