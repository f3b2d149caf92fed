"""Samples of grids of cases for `make test`; `make grids` sets the variable `FULL` and runs the whole grids.

Processes that tests start inherit the variable.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

FULL = "APEX_TEST_FULL_GRIDS"

Row = TypeVar("Row")
Column = TypeVar("Column")


def full_grids() -> bool:
    """Return whether whole grids are asked for."""
    return FULL in os.environ


def pairs(rows: Iterable[Row], columns: Sequence[Column], each: int, first: int = 0) -> list[tuple[Row, Column]]:
    """Return pairs of a row and a column: all of them in full grids, else `each` columns of every row.

    The columns of each row begin one behind those of the row before it, those of the first row at column `first`.
    Every column occurs if there are as many rows as columns.
    """
    count = len(columns) if full_grids() else each
    return [
        (row, columns[(first + number + step) % len(columns)])
        for number, row in enumerate(rows)
        for step in range(count)
    ]
