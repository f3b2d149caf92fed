"""How group norms are cut into programs."""

from __future__ import annotations

from typing import NamedTuple

from .._device import DeviceFacts, next_power_of_2
from .._tuned import tunable

# Elements of a group, its sizes rounded up to powers of two, up to which one program holds all of it. Times in
# microseconds are those of an H200, in bfloat16, channels last: the gradients of 8x960x32x32, 32768 elements a group,
# took 143 held at once and 55 in tiles.
SMALL_GROUP = {"forward": 32768, "backward": 16384}
# Bytes of a group side by side, where channels are last, from which on a program may read that group alone, and the
# elements of a tensor up to which it may in any case: groups of one channel of 47x32x96x96 took 179 forward, cut up
# they take as long as groups of many.
GROUP_BYTES, SCATTERED = 16, 1 << 22
# Elements of a group, its sizes rounded up to powers of two, that one program holds in the forward pass where channels
# are last and their number in a group is odd: then every value is loaded by itself. float32 47x112x48x48, with 32768
# elements a group of 7 channels, took 264; 48x48x56x56, of 6, takes 52, 4x416x28x28, 16384 elements of 13, 11. Cut up,
# bfloat16 2x808x48x48, of 101 channels, takes 24.
ODD_GROUP = 16384
# Elements that one program holds of each tensor where groups are cut up, and its warps. 8x2560x64x64: forward 211
# against 240 to 310 for other sizes where channels are last, 139 against 165 where they are not; backward 351 against
# 385 to 607, and 236 against 252.
FORWARD_TILE = {True: 8192, False: 4096}
FORWARD_WARPS = 4
BACKWARD_TILE = 2048
BACKWARD_WARPS = 2
# Of the kernels that add up the sums of tiles: chunks at a time, warps, and images and channels at a time.
CHUNK_BLOCK = 32
SUM_WARPS = 4
PARAMETER_BLOCK = (16, 64)


def groups_apart(elements: int, group_bytes: int, last: bool) -> bool:
    """Whether each group may have a program of its own: not where it would use little of the memory that it fetches."""
    return not last or group_bytes >= GROUP_BYTES or elements * (GROUP_BYTES // group_bytes) <= SCATTERED


def held_forward(positions: int, group_channels: int, last: bool) -> bool:
    """Whether one program may take a group in the forward pass, as far as the width of its loads goes."""
    elements = next_power_of_2(positions) * next_power_of_2(group_channels)
    return not last or group_channels % 2 == 0 or elements <= ODD_GROUP


class GroupConfig(NamedTuple):
    """One program per group of an image, which it holds at once."""

    position_block: int
    channel_block: int
    num_warps: int


@tunable(lambda config: ("num_warps",))
def small_config(
    positions: int, group_channels: int, direction: str, element_size: int, device: DeviceFacts
) -> GroupConfig | None:
    """None where a group is too large to be held by one program."""
    position_block, channel_block = next_power_of_2(positions), next_power_of_2(group_channels)
    elements = position_block * channel_block
    if elements > SMALL_GROUP[direction]:
        return None
    # 32 elements per thread, but 16 of small gradients: with silu bfloat16 3x96x16x16 in 9.1 (32: 16.3, 8: 8.5),
    # 1x152x7x7 in 10.0 (14.1, 6.7), 112x128x16x16 in 20.1 (21.9, 20.9), float16 55x832x8x8 in 20.9 (20.4, 23.7).
    per_warp = 512 if direction == "backward" and elements <= 2048 else 1024
    return GroupConfig(position_block, channel_block, min(16, max(1, elements // per_warp)))


class CutConfig(NamedTuple):
    """Groups that are cut up: elements that one program holds of each tensor, and its warps."""

    elements: int
    num_warps: int


@tunable(lambda config: config._fields)
def cut_config(
    images: int, positions: int, channels: int, last: bool, direction: str, element_size: int, device: DeviceFacts
) -> CutConfig:
    if direction == "forward":
        return CutConfig(FORWARD_TILE[last], FORWARD_WARPS)
    return CutConfig(BACKWARD_TILE, BACKWARD_WARPS)


class TileConfig(NamedTuple):
    """Tiles of `rows` positions and `channel_block` channels."""

    rows: int
    channel_block: int
    chunks: int
    channel_blocks: int


def tile_config(positions: int, channels: int, elements: int, last: bool) -> TileConfig:
    """Tiles of at most `elements`, long where memory is contiguous: along the channels if those are `last`."""
    if last:
        # As wide as divides the channels, because lanes beyond them are idle.
        block = next((width for width in (128, 64) if channels % width == 0), min(64, next_power_of_2(channels)))
        rows = min(elements // block, next_power_of_2(positions))
    else:
        rows = min(next_power_of_2(positions), 1024)
        # Fewer channels where positions are many: where an element lies in its tile is a 32-bit number in the kernels.
        addressed = (2**31 - 1) // positions
        block = min(elements // rows, next_power_of_2(channels), 1 << (addressed.bit_length() - 1))
    return TileConfig(rows, block, -(-positions // rows), -(-channels // block))
