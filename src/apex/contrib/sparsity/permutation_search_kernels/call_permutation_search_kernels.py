"""One function for all strategies of the search."""

from __future__ import annotations

from typing import Any

from ._search import ESCAPE_ATTEMPTS, search
from .permutation_utilities import as_tensor, sum_after_2_to_4

DEFAULTS: dict[str, Any] = {
    "strategy": "exhaustive",
    "stripe_group_size": 8,
    "escape_attempts": ESCAPE_ATTEMPTS,
    "progressive_search_time_limit": 60.0,  # seconds, as time_budget
    "time_budget": 60.0,
    "seed": 1,
}


def accelerated_search_for_good_permutation(
    matrix_group: Any, options: dict[str, Any] | None = None, verbosity: int = 0
) -> list[int]:
    """An order of the columns of `matrix_group`, an array or a tensor [rows, columns], for 2:4 pruning.

    `options`: "strategy" is "exhaustive" or "progressive channel swap", which differ only in the option that limits the
    time ("time_budget", "progressive_search_time_limit", seconds), or "user defined", which changes nothing;
    "stripe_group_size" is 8 or 12; "escape_attempts" and "seed".
    """
    chosen = {**DEFAULTS, **(options or {})}
    tensor = as_tensor(matrix_group)
    if chosen["strategy"] == "user defined":
        return list(range(tensor.shape[1]))
    limits = {"exhaustive": "time_budget", "progressive channel swap": "progressive_search_time_limit"}
    if chosen["strategy"] not in limits:
        raise ValueError(f"strategy {chosen['strategy']!r} is not known; use one of {[*limits, 'user defined']}")
    budget = float(chosen[limits[chosen["strategy"]]])
    found = search(tensor, chosen["stripe_group_size"], chosen["escape_attempts"], budget, chosen["seed"])
    if verbosity:
        before, after = sum_after_2_to_4(tensor), sum_after_2_to_4(tensor[:, found])
        print(f"permutation of {tensor.shape[1]} channels: keeps {after:.2f} in place of {before:.2f}")
    return found
