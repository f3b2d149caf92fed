"""Permutation search by swaps of channels between pairs of stripes."""

from __future__ import annotations

from typing import Any

from .exhaustive_search import Exhaustive_Search


def Channel_Swap(
    matrix: Any, escape_attempts: int = 0, verbosity: int = 0, permutation: list[int] | None = None
) -> tuple[Any, float, list[int]]:
    """Search over swaps of one or two columns between two stripes, that is all ways to split eight columns."""
    return Exhaustive_Search(matrix, 8, escape_attempts, permutation)
