"""Coordination of the processes that save or load a checkpoint together."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist

from .._distributed.collectives import gather_objects
from .._failures import explained
from ._damage import DamagedCheckpoint

# Errors that other processes raise with the same type; for other types they raise a RuntimeError.
_SHARED = {kind.__name__: kind for kind in (DamagedCheckpoint, FileNotFoundError, TypeError, ValueError)}


def is_connected() -> bool:
    """Return True if the default process group exists."""
    return dist.is_available() and dist.is_initialized()


def this_rank() -> int:
    """Return the rank of this process, or 0 without a process group."""
    return dist.get_rank() if is_connected() else 0


def is_first() -> bool:
    """Return True on rank 0, and without a process group."""
    return this_rank() == 0


def from_first(value: Any) -> Any:
    """Return rank 0's small object in all processes; all must call this."""
    if not is_connected():
        return value
    box = [value]
    with explained("hearing of a checkpoint from rank 0"):
        dist.broadcast_object_list(box, 0)
    return box[0]


def raise_everywhere(failure: BaseException | None, description: str, *, alone: bool = False) -> None:
    """Raise in all processes if any of them failed; all must call this, and they wait for each other.

    Raises an OSError with the same number if the failure was an OSError, otherwise a RuntimeError. With `alone` other
    processes are not asked.
    """
    own_failure = None
    if failure is not None:
        own_failure = getattr(failure, "errno", None), f"{type(failure).__name__}: {failure}"
    asking = "asking whether all ranks are done with a checkpoint"
    reasons = [own_failure] if alone else gather_objects(own_failure, asking)
    if failure is not None and not isinstance(failure, Exception):
        raise failure  # for example a KeyboardInterrupt
    for rank, failed in enumerate(reasons):
        if failed is not None:
            number, reason = failed
            message = f"{description}; rank {rank} had {reason}"
            raise (RuntimeError(message) if number is None else OSError(number, message)) from failure


@contextlib.contextmanager
def refusing_together() -> Iterator[None]:
    """Raise in all processes if the block fails in any of them; all must enter it, before anything is changed.

    A process whose block failed raises its own error. The others raise an error of the same type that names the rank.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    own_failure = None if failure is None else (type(failure).__name__, str(failure))
    reasons = gather_objects(own_failure, "asking whether all ranks can load a checkpoint")
    if failure is not None:
        raise failure
    for rank, failed in enumerate(reasons):
        if failed is not None:
            raise _SHARED.get(failed[0], RuntimeError)(f"rank {rank} cannot load a checkpoint: {failed[1]}")


def check_equal_on_all_ranks(value: Any, message: str) -> None:
    """Raise a RuntimeError in all processes unless all of them pass the same value."""
    values = gather_objects(value, "asking whether all ranks load the same checkpoint")
    others = [rank for rank, other in enumerate(values) if other != values[0]]
    if others:
        raise RuntimeError(f"{message}: rank {others[0]} has another one than rank 0")


@contextlib.contextmanager
def restoring(objects: Iterable[Any]) -> Iterator[None]:
    """Restore the current state of objects, such as schedulers, if the block fails."""
    saved = [
        (item, copy.deepcopy(item.state_dict()), set(getattr(item, "__dict__", ())))
        for item in objects
        if hasattr(item, "state_dict")
    ]
    try:
        yield
    except BaseException:
        for item, state, names in saved:
            for name in set(getattr(item, "__dict__", ())) - names:
                delattr(item, name)
            item.load_state_dict(state)
        raise
