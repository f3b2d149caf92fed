"""The search by windows: every way to share the columns of two or three stripes."""

from __future__ import annotations

import time
from typing import Any

from ....ops.permutation.reference import split_count
from ._search import search
from .permutation_utilities import as_tensor, like


def Exhaustive_Search(
    matrix: Any, stripe_group_size: int = -1, escape_attempts: int = 0, permutation: list[int] | None = None
) -> tuple[Any, float, list[int]]:
    """The matrix with its columns in a better order for 2:4 pruning, the seconds that took, and that order.

    `stripe_group_size` is the window, 8 or 12 columns; -1 looks at every order of a matrix of up to 16 columns.
    The search starts from `permutation`, if there is one.
    """
    start = time.perf_counter()
    tensor = as_tensor(matrix)
    columns = tensor.shape[1]
    if stripe_group_size == -1:
        if columns > 16:
            raise ValueError(
                f"{columns} columns can be ordered in {split_count(columns):.1e} ways, which are too many to look at: "
                "give stripe_group_size=8 or 12"
            )
        stripe_group_size = max(8, columns)
    order = list(range(columns)) if permutation is None else list(permutation)
    found = search(tensor[:, order], min(stripe_group_size, max(8, columns)), escape_attempts)
    order = [order[place] for place in found]
    return like(matrix, tensor[:, order]), time.perf_counter() - start, order
