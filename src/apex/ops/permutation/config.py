"""Launch choices of the permutation search."""

from __future__ import annotations

from .._device import next_power_of_2


def block(rows: int) -> int:
    """Rows that one warp works on at a time: 8 elements a thread leave 35 splits of them in registers."""
    return min(256, max(32, next_power_of_2(rows)))
