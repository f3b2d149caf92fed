"""The search by swaps of channels between pairs of stripes."""

from __future__ import annotations

from typing import Any

from .exhaustive_search import Exhaustive_Search


def Channel_Swap(
    matrix: Any, escape_attempts: int = 0, verbosity: int = 0, permutation: list[int] | None = None
) -> tuple[Any, float, list[int]]:
    """A search in which one or two columns change places between two stripes: all ways to share eight columns."""
    return Exhaustive_Search(matrix, 8, escape_attempts, permutation)
