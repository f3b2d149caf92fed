"""A search for the order of columns that keeps the largest magnitude after 2:4 pruning.

A stripe is 4 neighbouring columns; a window is a pair of stripes. The search evaluates every way to split each window's
columns into two stripes, and makes the best exchanges that touch no stripe twice. It then evaluates the windows that
changed, until nothing is gained. From there it restarts several times with a few columns exchanged at random, and keeps
the better order. It uses its own random generator: the same matrix gives the same order, unless time runs out.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import torch
from torch import Tensor

from ....ops import permutation as op
from ....ops._host import HOST
from .permutation_utilities import as_tensor, like

# An exchange must gain at least this share of the magnitude a window keeps: less is rounding of float32 sums.
_FLOOR = 1e-6
# More attempts find little: on a uniform 128 x 64 matrix none keep 2919.76, 10 attempts 2921.33, 137 2924.5.
ESCAPE_ATTEMPTS = 10
# The search shows a progress bar for matrices with more elements than this.
_LARGE = 1 << 16
# Seconds between two checks of the clock.
_BETWEEN_LOOKS = 0.1


class PermutationSearch:
    """The state of a search over `columns`, float32 [C, R]: an order of the columns and the gain of every window."""

    def __init__(self, columns: Tensor, deadline: float, bar: Any) -> None:
        self.columns, self.deadline, self.bar = columns, deadline, bar
        self.at_once = 16  # windows between two checks of the clock; doubled if they take little time
        self.order = torch.arange(len(columns), dtype=torch.int64, device=HOST)
        numbers = torch.arange(len(columns) // 4, dtype=torch.int64, device=HOST)
        self.members = torch.combinations(numbers)  # the two stripes of each window
        self.gains = torch.zeros(len(self.members), dtype=torch.float32, device=HOST)
        self.splits = torch.zeros(len(self.members), dtype=torch.int64, device=HOST)
        self.floor = _FLOOR * self.total() * 8 / max(1, len(columns))
        self.climb(numbers)

    def total(self) -> float:
        """Return the magnitude that pruning keeps in the present order."""
        return float(op.kept_magnitude(self.columns[self.order.to(self.columns.device)]).sum())

    def climb(self, changed: Tensor) -> None:
        """Make exchanges until none gains anything or time has run out; `changed` are the stripes to start from."""
        while len(changed):
            touched = torch.zeros(len(self.order) // 4, dtype=torch.bool, device=HOST).index_fill_(0, changed, True)
            (windows,) = torch.where(touched[self.members].any(1))
            self.gains[windows] = 0.0
            done = 0
            while not done or (done < len(windows) and not self._time_is_spent()):
                part = windows[done : done + self.at_once]
                done += len(part)
                start = time.monotonic()
                columns = self.order.view(-1, 4)[self.members[part]].flatten(1)
                gains, splits = op.best_splits(self.columns, columns.to(self.columns.device))
                self.gains[part], self.splits[part] = gains.to(HOST), splits.to(HOST)
                if len(part) == self.at_once:
                    self.at_once *= 2 if time.monotonic() - start < _BETWEEN_LOOKS / 2 else 1
            changed = self._exchange()
            if self._time_is_spent():
                break

    def _time_is_spent(self) -> bool:
        """Return whether the deadline has passed, and show the time in the progress bar."""
        now = time.monotonic()
        if self.bar is not None:
            self.bar.update(0, completed=self.bar.tasks[0].total - (self.deadline - now))
        return now > self.deadline

    def _exchange(self) -> Tensor:
        """Make the best exchanges, by falling gain, that touch no stripe twice; return the stripes that changed."""
        (gaining,) = torch.where(self.gains > self.floor)
        falling = gaining[self.gains[gaining].sort(descending=True, stable=True).indices]
        used: set[int] = set()
        chosen = []
        for number, (first, second) in zip(falling.tolist(), self.members[falling].tolist(), strict=True):
            if first not in used and second not in used:
                chosen.append(number)
                used.update((first, second))
        changed = self.members[chosen].flatten()
        stripes = self.order.view(-1, 4)
        shared = stripes[changed].view(-1, 8).gather(1, op.window_splits()[self.splits[chosen]])
        stripes[changed] = shared.view(-1, 4)
        return changed

    def escape(self, attempts: int, generator: torch.Generator) -> None:
        """Restart the search `attempts` times and keep the best order.

        Each restart moves a column of each of three random stripes to the next of them. No single exchange between two
        stripes can undo that, whereas it could undo a swap between two stripes.
        """
        most = self.total()
        for _ in range(attempts):
            if self._time_is_spent():
                break
            previous = self.order.clone(), self.gains.clone(), self.splits.clone()
            stripes = torch.randperm(len(self.order) // 4, generator=generator, dtype=torch.int64, device=HOST)[:3]
            columns = torch.randint(4, stripes.shape, generator=generator, dtype=torch.int64, device=HOST) + 4 * stripes
            self.order[columns] = self.order[columns.roll(1)]
            self.climb(stripes)
            if self.total() > most:
                most = self.total()
            else:
                self.order, self.gains, self.splits = previous


def search(
    matrix: Tensor, escape_attempts: int = ESCAPE_ATTEMPTS, time_budget: float = 60.0, seed: int = 1
) -> list[int]:
    """Return the best order found of the columns of `matrix`, [R, C] on any device, for 2:4 pruning."""
    columns = matrix.detach().abs().float().t().contiguous()
    if len(columns) % 4:
        raise ValueError(f"the matrix must have a multiple of 4 columns, got {len(columns)}")
    with contextlib.ExitStack() as stack:
        bar = None
        if columns.numel() > _LARGE and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            bar = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
            bar.add_task(f"permutation search {len(matrix)}x{len(columns)}", total=time_budget)
        state = PermutationSearch(columns, time.monotonic() + time_budget, bar)
        state.escape(escape_attempts, torch.Generator(device=HOST).manual_seed(seed))
    return state.order.tolist()


def Exhaustive_Search(
    matrix: Any, stripe_group_size: int = -1, escape_attempts: int = 0, permutation: list[int] | None = None
) -> tuple[Any, float, list[int]]:
    """Return the matrix with its columns in a better order for 2:4 pruning, the seconds taken, and that order.

    The search starts from `permutation`, if given. Windows have 8 columns. If `stripe_group_size` asks for wider
    windows, or for all columns (-1), at least a hundred restarts are made instead.
    """
    start = time.perf_counter()
    tensor = as_tensor(matrix)
    order = list(range(tensor.shape[1])) if permutation is None else list(permutation)
    attempts = escape_attempts if stripe_group_size == 8 else max(100, escape_attempts)
    order = [order[index] for index in search(tensor[:, order], attempts)]
    return like(matrix, tensor[:, order]), time.perf_counter() - start, order
