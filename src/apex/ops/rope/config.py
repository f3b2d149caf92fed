"""Launch choices for the rope kernel: small rules from shape and dtype. Times are microseconds on an H200."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .._device import DeviceFacts, launch_rule, next_power_of_2
from .._tuned import tunable

# Bytes of a tile. bfloat16 4096x4x32x128 by 128 threads: 4 KiB take 69 (angles), 70 (cached), 72 (packed), 73 (images);
# 8 KiB take 71, 73, 73, 77; 16 KiB and more, or several tiles one after the other, 72 and more. A plain copy in Triton
# takes as long (69, 71, 72; PyTorch's takes 68). With 2 KiB too many programs compute the same sines: 75.
TILE_BYTES = 4096
THREADS = 128
# Threads for images, whose tables are read rather than computed: 70 instead of 73.
IMAGE_THREADS = 64
# Longer rows than this are left to PyTorch.
LONGEST_ROW = 1 << 16


class Tile(NamedTuple):
    """Tile of one program: tokens and heads, and its warps."""

    tokens: int
    heads: int
    num_warps: int


@tunable(lambda tile: ("tokens", "heads", "num_warps"))
def tile(tokens: int, heads: int, channels: int, element_size: int, is_image: bool, device: DeviceFacts) -> Tile:
    row = next_power_of_2(channels)
    rows = max(1, TILE_BYTES // (row * element_size))
    most_tokens = min(rows, next_power_of_2(tokens))
    # With fewer angles than threads Triton lets every thread compute all the angles it needs: 129 where 72 is possible.
    tokens_per_tile = min(most_tokens, -(-THREADS // row))
    # A power of two that divides the heads, unless it is very small.
    divisor = heads & -heads
    per_tile = min(rows // tokens_per_tile, divisor if divisor >= 4 else next_power_of_2(heads))
    tokens_per_tile = min(rows // per_tile, most_tokens)
    most = IMAGE_THREADS if is_image else THREADS
    threads = min(most, max(device.warp_size, tokens_per_tile * min(row, per_tile * row * element_size // 32)))
    if element_size == 2 and 4 * channels == 3 * row:
        threads = max(device.warp_size, threads // 2)  # bfloat16 4096x2x40x96 in 36.7, with 128 threads 40.0
    return Tile(tokens_per_tile, per_tile, threads // device.warp_size)


@launch_rule
def channel_constants(
    layout: str, tables: int, inverse: bool, channels: int, rotated: int, pairs: str = "halves"
) -> tuple[str | int, ...]:
    """Return the CHANNELS constant of the kernels."""
    half, turned = rotated // 2, 4 if layout == "image" else 2
    # Copied channels are processed with the rotated ones if they come in chunks of the same size.
    chunks = turned if channels % half else channels // half
    rest = channels - chunks * half
    return (
        {"thd": "packed", "image": "image"}.get(layout, "index"),
        tables == 1,
        inverse,
        turned,
        chunks,
        next_power_of_2(chunks),
        half,
        next_power_of_2(half),
        rest,
        next_power_of_2(rest) if rest else 0,
        pairs.startswith("neighbours"),
        pairs.endswith("neighbours"),
    )


def strides_in_units(strides: Sequence[int]) -> tuple[int, list[int]]:
    """Return a unit, and strides counted in this unit.

    Triton knows of an integer only whether it is a multiple of 16. Counted in eights, strides that are multiples of 8
    only (heads of 72 channels) leave loads as wide as they can be.
    """
    common = math.gcd(*strides)
    unit = 1 if common % 16 == 0 else min(8, common & -common)
    return unit, [stride // unit for stride in strides]
