"""Trials of one kind: they are counted, shown as they go on, and what failed is kept."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.support.forks import fork


class Trials:
    """The trials of a part: counts them, shows how far they are, and keeps the first failures."""

    def __init__(self, name: str, count: int, seed: int, folder: Path) -> None:
        self.name, self.count, self.folder = name, count, folder
        self.rng = random.Random(f"{name} {seed}")
        self.seed = self.rng.randrange(2**31)
        self.done = 0
        self.failures: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self._shown = time.monotonic()

    def __iter__(self) -> Iterator[Path]:
        """A folder for each trial, which is removed after it."""
        for _ in range(self.count):
            with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                yield Path(folder)
            self.tell()

    def tell(self, outcome: str = "") -> None:
        """One more is done."""
        self.done += 1
        if outcome:
            self.outcomes[outcome] += 1
        if time.monotonic() - self._shown > 5 or self.done == self.count:
            self._shown = time.monotonic()
            print(f"  {self.name}: {self.done} of {self.count}, {len(self.failures)} failed", flush=True)

    @contextlib.contextmanager
    def expecting(self, what: str) -> Iterator[None]:
        """Counts as a failure what is raised inside."""
        try:
            yield
        except BaseException:
            self.failures.append(f"{what}:\n{traceback.format_exc()}")


def in_child(work: Callable[[], str]) -> str:
    """What `work` says in a forked process; how that ended if it did not come to say anything."""
    return in_children([work])[0]


def in_children(works: Sequence[Callable[[], str]]) -> list[str]:
    """The same of several, which run at a time; all are forked by this thread, since a fork of another may crash."""
    children = []
    for work in works:
        reading, writing = os.pipe()
        child = fork()
        if child == 0:
            try:
                said = work()
            except BaseException:
                said = traceback.format_exc()
            os.write(writing, said.encode()[:60_000])
            os._exit(0)
        os.close(writing)
        children.append((child, reading))
    answers = []
    for child, reading in children:
        with os.fdopen(reading) as pipe:
            said = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        answers.append(said if not status else f"ended with {status}; {said}")
    return answers
