"""Sharded checkpoints that writer processes write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ._sharded import write
from ._split import StagedPlanner


def write_staged(path: Path, plan_and_then: tuple[Any, Callable[[], None] | None], data: list[Any]) -> None:
    """Write a checkpoint that another process planned; the writer processes of all ranks call it.

    `data` has a tensor or the bytes of a value for each item of the plan.
    """
    plan, then = plan_and_then
    write(path, {}, StagedPlanner(plan, data), then)
