"""Launch choices of the float8 casts."""

from __future__ import annotations

from typing import NamedTuple

from .._device import DeviceFacts, launch_rule


class Tile(NamedTuple):
    """What one program casts: `rows` x `columns` elements."""

    rows: int
    columns: int
    num_warps: int


@launch_rule
def cast_tile(rows: int, columns: int, device: DeviceFacts) -> Tile:
    """Square, since both copies are written in rows of whole memory sectors."""
    return Tile(64, 128, 4)


@launch_rule
def amax_tile(device: DeviceFacts) -> Tile:
    """For the largest magnitudes of rows and columns, each added to memory once per tile."""
    return Tile(128, 128, 8)


# Elements that a program of the largest magnitude of a whole matrix looks at in one turn, and such programs at most:
# what they found is read again by every program that casts.
AMAX_BLOCK = 4096
AMAX_WARPS = 8
MOST_PARTIALS = 512
