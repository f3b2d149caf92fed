"""A search for the order of columns of which 2:4 pruning keeps most.

Stripes are 4 neighbouring columns. Every pair of stripes (or three, with windows of 12 columns) is looked at in every
way to share its columns; the best exchanges that touch no stripe twice are made; then what changed is looked at again,
until nothing is gained. From there the search starts again with a few columns exchanged at random, and keeps what came
out better. It draws from a generator of its own: the same matrix gives the same order, unless time runs out.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ....ops import permutation as op
from ....ops._host import HOST

# An exchange must gain this share of what a window keeps: less is rounding of float32 sums.
_FLOOR = 1e-6
# More of them find little: on a uniform 128 x 64 matrix none keep 2919.76, 10 attempts 2921.33, 137 2924.5.
ESCAPE_ATTEMPTS = 10
# A search that takes longer shows a progress bar, in seconds.
_PATIENCE = 2.0


class Search:
    """The state of a search over `columns`, float32 [C, R]: an order of the columns and the gain of every window."""

    def __init__(self, columns: Tensor, window: int, deadline: float, report: Callable[[float], None]) -> None:
        self.columns = columns
        self.stripes = len(columns) // 4
        self.order = torch.arange(len(columns), dtype=torch.int64, device=HOST)
        self.report = report
        self.deadline = deadline
        numbers = torch.arange(self.stripes, dtype=torch.int64, device=HOST)
        self.members = torch.combinations(numbers, window // 4)  # the stripes of each window
        self.gains = torch.zeros(len(self.members), dtype=torch.float32, device=HOST)
        self.splits = torch.zeros(len(self.members), dtype=torch.int64, device=HOST)
        self.floor = _FLOOR * self.total() * window / max(1, len(columns))

    def total(self) -> float:
        """What pruning keeps in the present order."""
        return float(op.kept_magnitude(self.columns[self.order.to(self.columns.device)]).sum())

    def measure(self, windows: Tensor) -> None:
        """Finds the best split of the windows with these numbers."""
        columns = self.order.view(-1, 4)[self.members[windows]].flatten(1)
        gains, splits = op.best_splits(self.columns, columns.to(self.columns.device))
        self.gains[windows], self.splits[windows] = gains.to(HOST), splits.to(HOST)

    def climb(self, changed: Tensor | None = None) -> bool:
        """Makes exchanges until none gains anything; `changed`, bool [stripes], were touched. False: out of time."""
        if changed is None:
            changed = torch.ones(self.stripes, dtype=torch.bool, device=HOST)
        while True:
            self.measure(torch.where(changed[self.members].any(1))[0])
            changed = self._exchange()
            if not bool(changed.any()):
                return True
            if time.monotonic() > self.deadline:
                return False
            self.report(time.monotonic())

    def _exchange(self) -> Tensor:
        """Makes the best exchanges, by falling gain, that touch no stripe twice; the stripes that changed."""
        changed = torch.zeros(self.stripes, dtype=torch.bool, device=HOST)
        (gaining,) = torch.where(self.gains > self.floor)
        if not len(gaining):
            return changed
        falling = gaining[self.gains[gaining].sort(descending=True, stable=True).indices]
        used, chosen = [False] * self.stripes, []
        for number, members in zip(falling.tolist(), self.members[falling].tolist(), strict=True):
            if not any(used[stripe] for stripe in members):
                chosen.append(number)
                for stripe in members:
                    used[stripe] = True
                if sum(used) > self.stripes - len(members):
                    break
        members = self.members[chosen]
        stripes = self.order.view(-1, 4)
        columns = stripes[members].flatten(1)
        shared = columns.gather(1, op.window_splits(columns.shape[1])[self.splits[chosen]])
        stripes[members.flatten()] = shared.view(-1, 4)
        changed[members.flatten()] = True
        return changed

    def escape(self, attempts: int, generator: torch.Generator) -> None:
        """Moves a column of each of three random stripes to the next and climbs again, so often; keeps the best order.

        No exchange between two stripes takes three back, as it would take back one of two.
        """
        best = (self.total(), self.order.clone(), self.gains.clone(), self.splits.clone())
        for _ in range(attempts):
            if time.monotonic() > self.deadline:
                break
            stripes = torch.randperm(self.stripes, generator=generator, dtype=torch.int64, device=HOST)[:3]
            places = torch.randint(4, stripes.shape, generator=generator, dtype=torch.int64, device=HOST) + 4 * stripes
            self.order[places] = self.order[places.roll(1)]
            changed = torch.zeros(self.stripes, dtype=torch.bool, device=HOST)
            changed[stripes] = True
            self.climb(changed)
            total = self.total()
            if total > best[0]:
                best = (total, self.order.clone(), self.gains.clone(), self.splits.clone())
            else:
                self.order, self.gains, self.splits = (kept.clone() for kept in best[1:])
        self.order = best[1]


def search(
    matrix: Tensor, window: int = 8, escape_attempts: int = ESCAPE_ATTEMPTS, time_budget: float = 60.0, seed: int = 1
) -> list[int]:
    """The order of the columns of `matrix`, [R, C] on any device, of which 2:4 pruning keeps most that was found."""
    columns = matrix.detach().abs().float().t().contiguous()
    count = len(columns)
    if count % 4:
        raise ValueError(f"the matrix must have a multiple of 4 columns, got {count}")
    if window not in (8, 12, 16):
        raise ValueError(f"a window has 8, 12 or 16 columns, got {window}")
    if count < 8:
        return list(range(count))
    start = time.monotonic()
    generator = torch.Generator(device=HOST).manual_seed(seed)
    with progress(f"permutation search {len(matrix)}x{count}", start, time_budget) as report:
        found = Search(columns, 8, start + time_budget, report)
        if found.climb():
            found.escape(escape_attempts, generator)
        if window > 8 and count > 8:
            order = found.order
            found = Search(columns, min(window, count), start + time_budget, report)
            found.order = order
            found.climb()
    return found.order.tolist()


@contextlib.contextmanager
def progress(title: str, start: float, time_budget: float) -> Iterator[Callable[[float], None]]:
    """A function to call now and then with the time; shows how much of the budget is spent once it takes long."""
    shown: list = []

    def report(now: float) -> None:
        if not shown and now - start > _PATIENCE and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            bar = Progress(console=Console(stderr=True), transient=True)
            bar.start()
            shown.extend((bar, bar.add_task(title, total=time_budget)))
        if shown:
            shown[0].update(shown[1], completed=now - start)

    try:
        yield report
    finally:
        if shown:
            shown[0].stop()
