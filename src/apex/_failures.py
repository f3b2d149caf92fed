"""What to say when processes that work together cannot reach each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

# Errors of this process alone, which say enough, and which callers may catch by their kind.
OWN = (NotImplementedError, torch.OutOfMemoryError)


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
    """The same for those who catch errors themselves, which costs nothing where there is none."""
    return RuntimeError(
        f"rank {dist.get_rank()} of {dist.get_world_size()}: {what} failed. Another process has ended, or has not "
        "answered within the timeout of the process group: the first error that any rank printed says more. "
        f"Training cannot go on; start all processes again from the last checkpoint. ({error})"
    )
