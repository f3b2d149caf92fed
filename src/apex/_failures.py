"""Error messages for failed communication between processes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

# Errors of this process alone. They are raised as they are, so that callers can catch their types.
OWN = (NotImplementedError, torch.OutOfMemoryError)
# Seconds that a rank waits for the others to report that they failed too.
_PATIENCE = 1.0
# Seconds after which the process that has the store counts as stopped: more, because a busy one takes its time.
_STORE_PATIENCE = 3 * _PATIENCE


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Replace errors of torch.distributed in the block by one that names the rank, likely causes and the remedy.

    `what` describes the operation, such as "averaging gradients".
    """
    try:
        yield
    except OWN:
        raise
    except RuntimeError as error:  # backends raise RuntimeError or its subclass DistError
        raise unanswered(what, error) from error


def unanswered(what: str, error: RuntimeError) -> RuntimeError:
    """Return the error that `explained` raises, for callers that use `try` because a context takes microseconds."""
    return RuntimeError(
        f"rank {dist.get_rank()} of {dist.get_world_size()}: {what} failed. Another process has ended, or has not "
        f"answered within the timeout of the process group: {_silent_ranks()}the first error that any rank printed "
        f"says more. Training cannot go on; start all processes again from the last checkpoint. ({error})"
    )


def _silent_ranks() -> str:
    """Return a clause that names the ranks without a failure report; ranks report through the process group's store.

    A thread asks the store: a TCPStore waits without a limit for the process that has it, which may be the stopped one.
    """
    try:
        store = dist.distributed_c10d._get_default_store()
    except ValueError:  # no process group
        return ""
    own, problems = dist.get_rank(), ["does not answer"]
    others = [rank for rank in range(dist.get_world_size()) if rank != own]
    end = time.monotonic() + _PATIENCE

    def ask() -> None:
        try:
            store.set(_failure_of(own), "reported")
            while others and time.monotonic() < end:
                others[:] = [rank for rank in others if not store.check([_failure_of(rank)])]
                time.sleep(0.05)
            problems.clear()
        except RuntimeError:
            problems[:] = ["is gone"]

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_STORE_PATIENCE)
    if problems:
        return f"the process that has the store, as a rule rank 0, {problems[0]}; "
    if not others:
        return ""
    return f"no failure is reported by rank {', '.join(map(str, others))}, which has ended or still waits; "


def _failure_of(rank: int) -> str:
    return f"apex: failure of rank {rank}"
