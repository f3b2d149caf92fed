"""A single entry point for all strategies of the permutation search."""

from __future__ import annotations

from typing import Any

from .exhaustive_search import ESCAPE_ATTEMPTS, search
from .permutation_utilities import as_tensor, sum_after_2_to_4

_LIMITS = {"exhaustive": "time_budget", "progressive channel swap": "progressive_search_time_limit"}


def accelerated_search_for_good_permutation(
    matrix_group: Any, options: dict[str, Any] | None = None, verbosity: int = 0
) -> list[int]:
    """Return an order of the columns of `matrix_group`, an array or tensor [rows, columns], for 2:4 pruning.

    The options are "strategy", "escape_attempts", "seed" and a time limit. The strategy "user defined" returns the
    columns in their given order. "exhaustive" and "progressive channel swap" run the same search and differ only in
    the name of the time limit ("time_budget", "progressive_search_time_limit"), 60 seconds by default.
    """
    settings, tensor = options or {}, as_tensor(matrix_group)
    strategy = settings.get("strategy", "exhaustive")
    if strategy == "user defined":
        return list(range(tensor.shape[1]))
    if strategy not in _LIMITS:
        raise ValueError(f"strategy {strategy!r} is not known; use one of {[*_LIMITS, 'user defined']}")
    escapes, budget = settings.get("escape_attempts", ESCAPE_ATTEMPTS), settings.get(_LIMITS[strategy], 60.0)
    order = search(tensor, escapes, budget, settings.get("seed", 1))
    if verbosity > 0:
        before, after = sum_after_2_to_4(tensor), sum_after_2_to_4(tensor[:, order])
        print(f"permutation of {tensor.shape[1]} channels: keeps {after:.2f} in place of {before:.2f}")
    return order
