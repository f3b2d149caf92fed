"""Launch choices for the rope kernel: small rules from shape and dtype. Times are microseconds on an H200."""

from __future__ import annotations

from dataclasses import dataclass

from .._device import DeviceFacts, next_power_of_2

# Bytes of a tile. bfloat16 4096x4x32x128 by 128 threads: 4 KiB take 69 (angles), 70 (cached), 72 (packed), 73 (images);
# 8 KiB take 71, 73, 73, 77; 16 KiB and more, or several tiles one after the other, 72 and more. A plain copy in Triton
# is no different (69, 71, 72; PyTorch's takes 68). With 2 KiB too many programs compute the same sines: 75.
TILE_BYTES = 4096
THREADS = 128
# Of images, whose tables are read rather than computed: 70 instead of 73.
IMAGE_THREADS = 64
# Longer rows than this are left to PyTorch.
LONGEST_ROW = 1 << 16


@dataclass(frozen=True)
class Tile:
    """What one program takes; `full`: no token and no head needs a mask."""

    tokens: int
    heads: int
    num_warps: int
    full: bool

    def programs(self, tokens: int, batch: int, heads: int) -> int:
        return -(-tokens // self.tokens) * batch * -(-heads // self.heads)


def tile(tokens: int, heads: int, channels: int, itemsize: int, device: DeviceFacts, *, is_image: bool = False) -> Tile:
    row = next_power_of_2(channels)
    rows = max(1, TILE_BYTES // (row * itemsize))
    # With fewer angles than threads Triton lets every thread compute all that it needs: 129 where 72 is possible.
    tokens_per_tile = min(rows, next_power_of_2(tokens), -(-THREADS // row))
    # A power of two that divides the heads, unless that leaves next to nothing of them.
    divisor = heads & -heads
    per_tile = min(rows // tokens_per_tile, divisor if divisor >= 4 else next_power_of_2(heads))
    tokens_per_tile = min(rows // per_tile, next_power_of_2(tokens))
    most = IMAGE_THREADS if is_image else THREADS
    threads = min(most, max(device.warp_size, tokens_per_tile * min(row, per_tile * row * itemsize // 32)))
    return Tile(
        tokens_per_tile,
        per_tile,
        threads // device.warp_size,
        tokens % tokens_per_tile == 0 and heads % per_tile == 0,
    )
