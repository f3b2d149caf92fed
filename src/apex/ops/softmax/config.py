"""Launch choices of the softmax. Times are microseconds on an H200, of kernels launched directly."""

from __future__ import annotations

from typing import NamedTuple

from .._device import DeviceFacts, next_power_of_2
from .._tuned import tunable

# Below this many elements the host is the limit, and PyTorch's own operator is quicker if it computes the same.
NATIVE_BELOW = 1 << 22


class Config(NamedTuple):
    """Launch choices: `held` programs keep whole rows in registers; others walk one row in chunks of `block`."""

    held: bool
    rows: int
    block: int
    num_warps: int


@tunable(lambda config: ("rows" if config.held else "block", "num_warps"))
def rows_config(
    queries: int, keys: int, causal: bool, backward: bool, element_size: int, device: DeviceFacts
) -> Config:
    """Return the launch choices for rows of `keys` elements."""
    block = max(16, next_power_of_2(keys))
    if block > (8192 if causal else 16384):
        # In a held row, hidden keys cost as much as others. Causal bfloat16 4x16384x16384: forward in 894, backward in
        # 1207 (chunks of 4096: 1375); held, 16 warps: 1072 and 1439.
        return Config(False, 1, 8192 if backward else 4096, 256 // device.warp_size)
    # 32 elements per thread. Causal bfloat16 16x8192x8192: forward in 866 (64 elements: 860; in chunks: 989), backward
    # in 1106 (64: 1131; 16: 1266). Without a mask 16384x16384: 283 and 402 (in chunks: 319 and 432).
    rows = 1
    while rows * block < 1024 and 2 * rows <= queries:
        rows *= 2
    threads = max(device.warp_size, rows * block // 32)
    return Config(True, rows, block, threads // device.warp_size)
