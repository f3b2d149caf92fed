"""Launch choices of products with indexed rows."""

from __future__ import annotations

from typing import NamedTuple

from .._device import DeviceFacts, next_power_of_2

# Below this many elements the host is the limit, and sorting from Python takes more host time than PyTorch's operators
# do: a step of 8192x256 takes 553 us of an H200's host, with the operators 373.
NATIVE_BELOW = 1 << 23
# Number of rows of in1 that are cleared, or of partial sums that are added, at a time.
FINISH_ROWS = 16


class Tile(NamedTuple):
    """Tile that one program works on at a time: `rows` rows or chunks, `block` columns wide."""

    rows: int
    block: int
    num_warps: int


# Elements of a tile, and elements per thread.
FORWARD, BACKWARD = (1024, 8), (512, 4)


def tile(width: int, elements: int, per_thread: int, device: DeviceFacts) -> Tile:
    block = min(1024, next_power_of_2(width))
    rows = max(1, elements // block)
    return Tile(rows, block, max(1, min(512, rows * block // per_thread) // device.warp_size))


def finish_warps(block: int, device: DeviceFacts) -> int:
    return max(1, min(512, FINISH_ROWS * block // 16) // device.warp_size)


def backward_steps(count: int, device: DeviceFacts) -> int:
    """Return the sorted positions per chunk: many, so that few partial sums remain, if all programs get chunks.

    800000x256 and 200000 rows of in1: 728 us and 24 to finish with 128 positions, 721 and 63 with 32.
    """
    return 128 if count >= 128 * 16 * device.multiprocessors else 32
