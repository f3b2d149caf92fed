"""Restriction of all threads of the process to one core, while a GPU is timed.

autograd runs a backward pass in its own thread, so a call hands over to that thread and back. If the thread wakes up on
another core, that core may have to be woken first and has nothing of Python in its caches. On a virtual machine the
same backward pass of a norm kept the host busy for 78 us on one core and for 156 to 219 us on several, and this changed
from second to second. On one core only the handover remains, equally for every implementation.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_TASKS = Path("/proc/self/task")


def may_be_chosen() -> bool:
    """Return whether threads can be moved between cores: on Linux."""
    return hasattr(os, "sched_setaffinity") and _TASKS.is_dir()


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Keep the process on its current core; threads that start in the context stay there too.

    On exit each thread gets its former cores back (OpenMP may have given one to each); a new thread gets this one's.
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
    cores = {}
    for thread in _threads():
        with contextlib.suppress(OSError):  # the thread has ended
            cores[thread] = os.sched_getaffinity(thread)
    return cores


def _move_threads(cores: dict[int, set[int]], others: set[int]) -> None:
    """Move every thread to its `cores`, and threads missing there to `others`."""
    for thread in _threads():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread, cores.get(thread, others))


def _threads() -> list[int]:
    return [int(task.name) for task in _TASKS.iterdir()]
