"""All threads of the process on one core, while a GPU is timed.

autograd runs a backward pass in a thread of its own, so a call hands over to that thread and back. Where the thread
wakes up on another core, that core may first have to be woken and has nothing of Python in its caches: on a virtual
machine the same backward pass of a norm kept the host busy for 78 us on one core and for 150 to 220 us on sixteen, and
which of these it would be changed from second to second. On one core there is only the handover, for every
implementation alike.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_TASKS = Path("/proc/self/task")


def may_be_chosen() -> bool:
    """Whether threads can be moved here: on Linux."""
    return hasattr(os, "sched_setaffinity") and _TASKS.is_dir()


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Keeps the process on the core it runs on; threads that start meanwhile stay there too."""
    before = os.sched_getaffinity(0)
    _move_threads({_current_core()} & before or {min(before)})
    try:
        yield
    finally:
        _move_threads(before)


def _current_core() -> int:
    fields_after_the_name = (_TASKS / str(os.getpid()) / "stat").read_text().rpartition(")")[2].split()
    return int(fields_after_the_name[36])


def _move_threads(cores: set[int]) -> None:
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(int(task.name), cores)
