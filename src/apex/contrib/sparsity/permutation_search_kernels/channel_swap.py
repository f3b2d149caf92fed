"""The search by swaps of channels between pairs of stripes."""

from __future__ import annotations

from typing import Any

from .exhaustive_search import Exhaustive_Search


def Channel_Swap(
    matrix: Any, escape_attempts: int = 0, verbosity: int = 0, permutation: list[int] | None = None
) -> tuple[Any, float, list[int]]:
    """The matrix in a better order, the seconds that took, and that order.

    One or two columns change places between two stripes at a time, which are all ways to share eight columns.
    """
    found = Exhaustive_Search(matrix, 8, escape_attempts, permutation)
    if verbosity:
        print(f"channel swaps took {found[1]:.3f} s")
    return found
