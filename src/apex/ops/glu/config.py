"""Launch choices of the gated linear units. Times are of 16384x22016 bfloat16 on an H200, in microseconds."""

from __future__ import annotations

from typing import NamedTuple

from .._device import DeviceFacts, next_power_of_2
from .._tuned import tunable


class Tile(NamedTuple):
    """Tile that one program works on at a time: `rows` x `block` elements of the output."""

    rows: int
    block: int
    num_warps: int
    num_stages: int = 1


def _tile(width: int, rows: int, elements: int, per_thread: int, device: DeviceFacts) -> Tile:
    """Return a tile of about `elements`, at most 1024 wide, and no larger than the tensor."""
    block = min(1024, next_power_of_2(width))
    while width % block and width % (block // 2) == 0 and block > 256:
        block //= 2  # avoids masks, as long as a tile's rows are still long
    tall = min(max(1, elements // block), next_power_of_2(rows))
    threads = min(max(device.warp_size, tall * block // per_thread), 512)
    return Tile(tall, block, max(1, threads // device.warp_size))


@tunable(lambda tile: ("rows", "block", "num_warps"))
def forward_tile(rows: int, width: int, element_size: int, device: DeviceFacts) -> Tile:
    """Return the forward tile: one row of 1024 columns, or of 512 if only that divides the width.

    It takes 251.6 with or without a bias; two rows take 276, 2048 columns 257, 4096 columns 284. bfloat16 8192x11264,
    whose rows are cut into 512 columns, takes 70.0; with two rows 73.2.
    """
    return _tile(width, rows, 512 if width > 256 else 1024, 8, device)


@tunable(lambda tile: ("rows", "block", "num_warps", "num_stages"))
def backward_tile(rows: int, width: int, element_size: int, bias_grad: bool, device: DeviceFacts) -> Tile:
    """Return the backward tile. Without a bias's gradient every tile takes 420.

    With a bias's gradient, two programs per multiprocessor that load two tiles of two rows ahead take 439, of four rows
    456; 8192x11264 take 122 with 2048 elements in a tile and 131 with 4096, 4096x28672 152 and 160. Four programs that
    load none ahead take 471; one row at a time 452 to 596, the best with 21 times as many sums to add.
    """
    if not bias_grad:
        return _tile(width, rows, 1024, 8, device)
    tile = _tile(width, rows, 2048, 16, device)
    # Three tensors are loaded ahead, by two programs per multiprocessor.
    ahead = min(2, (device.shared_memory // 2 - 8192) // (3 * tile.rows * tile.block * element_size))
    return tile._replace(num_stages=1 + max(0, ahead))


def backward_groups(tiles: int, column_blocks: int, device: DeviceFacts) -> int:
    """Return how many programs share a block of columns when they sum the bias's gradient."""
    return max(1, min(tiles, 2 * device.multiprocessors // column_blocks))
