"""Launch choices for the rope kernel: small rules from shape and dtype."""

from __future__ import annotations

from dataclasses import dataclass

from .._device import DeviceFacts

# Bytes of a tile: enough loads in flight per thread, and enough heads to share a token's sines.
TILE_BYTES = 16384
# Longer rows than this are left to PyTorch.
LONGEST_ROW = 1 << 16
# Bytes of an output that no L2 cache holds.
STREAMED = 128 << 20


@dataclass(frozen=True)
class Tile:
    """What one program takes; `full`: no token and no head needs a mask."""

    tokens: int
    heads: int
    num_warps: int
    full: bool

    def programs(self, tokens: int, batch: int, heads: int) -> int:
        return -(-tokens // self.tokens) * batch * -(-heads // self.heads)


def next_power_of_2(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def tile(tokens: int, heads: int, channels: int, itemsize: int, device: DeviceFacts) -> Tile:
    rows = max(1, TILE_BYTES // (next_power_of_2(channels) * itemsize))
    # A power of two that divides the heads, unless that leaves next to nothing of them.
    divisor = heads & -heads
    per_tile = min(rows, divisor if divisor >= min(rows, 4) else next_power_of_2(heads))
    tokens_per_tile = min(max(1, rows // per_tile), next_power_of_2(tokens))
    elements = per_tile * tokens_per_tile * next_power_of_2(channels)
    threads = min(128, max(32, elements * itemsize // 64))
    return Tile(
        tokens_per_tile,
        per_tile,
        max(1, threads // device.warp_size),
        tokens % tokens_per_tile == 0 and heads % per_tile == 0,
    )
