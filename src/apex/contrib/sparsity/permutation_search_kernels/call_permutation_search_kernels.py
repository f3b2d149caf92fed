"""One function for all strategies of the search."""

from __future__ import annotations

from typing import Any

from .exhaustive_search import ESCAPE_ATTEMPTS, search
from .permutation_utilities import as_tensor, sum_after_2_to_4

_LIMITS = {"exhaustive": "time_budget", "progressive channel swap": "progressive_search_time_limit"}


def accelerated_search_for_good_permutation(
    matrix_group: Any, options: dict[str, Any] | None = None, verbosity: int = 0
) -> list[int]:
    """An order of the columns of `matrix_group`, an array or a tensor [rows, columns], for 2:4 pruning.

    `options`: "strategy" is "exhaustive" or "progressive channel swap", which differ only in the option that limits the
    time ("time_budget", "progressive_search_time_limit", 60 seconds), or "user defined", which changes nothing;
    "escape_attempts" and "seed".
    """
    given, tensor = options or {}, as_tensor(matrix_group)
    strategy = given.get("strategy", "exhaustive")
    if strategy == "user defined":
        return list(range(tensor.shape[1]))
    if strategy not in _LIMITS:
        raise ValueError(f"strategy {strategy!r} is not known; use one of {[*_LIMITS, 'user defined']}")
    escapes, budget = given.get("escape_attempts", ESCAPE_ATTEMPTS), given.get(_LIMITS[strategy], 60.0)
    found = search(tensor, escapes, budget, given.get("seed", 1))
    if verbosity > 0:
        before, after = sum_after_2_to_4(tensor), sum_after_2_to_4(tensor[:, found])
        print(f"permutation of {tensor.shape[1]} channels: keeps {after:.2f} in place of {before:.2f}")
    return found
