"""What to say when processes that work together cannot reach each other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

# Errors of this process alone, which say enough, and which callers may catch by their kind.
OWN = (NotImplementedError, torch.OutOfMemoryError)
# Seconds that a rank gives the others to report that they failed too.
_PATIENCE = 1.0


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Says in which rank `what` failed, why that may be, and what to do; for calls of torch.distributed inside."""
    try:
        yield
    except OWN:
        raise
    # Backends raise it, or DistError, which is one.
    except RuntimeError as error:
        raise unanswered(what, error) from error


def unanswered(what: str, error: RuntimeError) -> RuntimeError:
    """The error that `explained` raises, for callers with a `try` of their own: a context takes microseconds."""
    return RuntimeError(
        f"rank {dist.get_rank()} of {dist.get_world_size()}: {what} failed. Another process has ended, or has not "
        f"answered within the timeout of the process group: {_silent_ranks()}the first error that any rank printed "
        f"says more. Training cannot go on; start all processes again from the last checkpoint. ({error})"
    )


def _silent_ranks() -> str:
    """Which ranks do not report a failure at the same time as this one, by way of the store where all have met."""
    others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(_failure_of(dist.get_rank()), "reported")
        end = time.monotonic() + _PATIENCE
        while others and time.monotonic() < end:
            others = [rank for rank in others if not store.check([_failure_of(rank)])]
            time.sleep(0.05)
    except ValueError:  # no process group
        return ""
    except RuntimeError:  # the store was in the process that has ended
        return "the process that had the store, as a rule rank 0, is gone; "
    if not others:
        return ""
    return f"no failure is reported by rank {', '.join(map(str, others))}, which has ended or still waits; "


def _failure_of(rank: int) -> str:
    return f"apex: failure of rank {rank}"
