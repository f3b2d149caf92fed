"""All threads of the process on one core, while a GPU is timed.

autograd runs a backward pass in a thread of its own, so a call hands over to that thread and back. Where the thread
wakes up on another core, that core may first have to be woken and has nothing of Python in its caches: on a virtual
machine the same backward pass of a norm kept the host busy for 78 us on one core and for 156 to 219 us on several, and
which of these it would be changed from second to second. On one core there is
only the handover, for every implementation alike.
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
    """Keeps the process on the core it runs on; threads that start meanwhile stay there too.

    Afterwards each thread has its own cores again (OpenMP may have given one to each), a new one those of this thread.
    """
    own, before = os.sched_getaffinity(0), _cores_of_threads()
    core = {_current_core()} & own or {min(own)}
    _move_threads({}, core)
    try:
        yield
    finally:
        _move_threads(before, own)


def _current_core() -> int:
    fields_after_the_name = (_TASKS / str(os.getpid()) / "stat").read_text().rpartition(")")[2].split()
    return int(fields_after_the_name[36])


def _cores_of_threads() -> dict[int, set[int]]:
    found = {}
    for thread in _threads():
        with contextlib.suppress(OSError):  # it has ended
            found[thread] = os.sched_getaffinity(thread)
    return found


def _move_threads(cores: dict[int, set[int]], others: set[int]) -> None:
    """Every thread to its `cores`, those that have none there to the `others`."""
    for thread in _threads():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread, cores.get(thread, others))


def _threads() -> list[int]:
    return [int(task.name) for task in _TASKS.iterdir()]
