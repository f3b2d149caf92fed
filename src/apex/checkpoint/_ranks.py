"""What processes that save together have to know of each other."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist

from .._failures import explained
from ._damage import DamagedCheckpoint

# Errors that other processes raise as they are; they raise a RuntimeError in the place of others.
_SHARED = {each.__name__: each for each in (DamagedCheckpoint, FileNotFoundError, TypeError, ValueError)}


def is_connected() -> bool:
    return dist.is_available() and dist.is_initialized()


def this_rank() -> int:
    """The number of this process; 0 if it is alone."""
    return dist.get_rank() if is_connected() else 0


def is_first() -> bool:
    """Whether this process is rank 0, or alone."""
    return this_rank() == 0


def from_first(value: Any) -> Any:
    """A small object of rank 0, for all; called in all processes."""
    if not is_connected():
        return value
    box = [value]
    with explained("hearing of a checkpoint from rank 0"):
        dist.broadcast_object_list(box, 0)
    return box[0]


def raise_everywhere(failure: BaseException | None, what: str, *, alone: bool = False) -> None:
    """Raises in all processes what went wrong in any of them; called in all, and none goes on before the last.

    An OSError with the same number, if it was one, else a RuntimeError. With `alone` others are not asked.
    """
    mine = None
    if failure is not None:
        mine = getattr(failure, "errno", None), f"{type(failure).__name__}: {failure}"
    reasons: list[tuple[int | None, str] | None] = [mine]
    if is_connected() and not alone:
        reasons = [None] * dist.get_world_size()
        with explained("asking whether all ranks are done with a checkpoint"):
            dist.all_gather_object(reasons, mine)
    if failure is not None and not isinstance(failure, Exception):
        raise failure  # a KeyboardInterrupt, say
    for rank, found in enumerate(reasons):
        if found is not None:
            number, reason = found
            message = f"{what}; rank {rank} had {reason}"
            raise (RuntimeError(message) if number is None else OSError(number, message)) from failure


@contextlib.contextmanager
def refusing_together() -> Iterator[None]:
    """Raise in all processes if the block fails in any of them; called in all, before anything is changed.

    A process whose block failed raises its own error, the others one of that kind that names the rank.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    reasons: list[tuple[str, str] | None] = [None if failure is None else (type(failure).__name__, str(failure))]
    if is_connected():
        mine = reasons[0]
        reasons = [None] * dist.get_world_size()
        with explained("asking whether all ranks can load a checkpoint"):
            dist.all_gather_object(reasons, mine)
    if failure is not None:
        raise failure
    for rank, found in enumerate(reasons):
        if found is not None:
            raise _SHARED.get(found[0], RuntimeError)(f"rank {rank} cannot load a checkpoint: {found[1]}")


def check_same_everywhere(value: Any, message: str) -> None:
    """Raise a RuntimeError in all processes unless they all have given the same value."""
    if not is_connected():
        return
    values: list[Any] = [None] * dist.get_world_size()
    with explained("asking whether all ranks load the same checkpoint"):
        dist.all_gather_object(values, value)
    others = [rank for rank, each in enumerate(values) if each != values[0]]
    if others:
        raise RuntimeError(f"{message}: rank {others[0]} has another one than rank 0")


@contextlib.contextmanager
def restoring(objects: Iterable[Any]) -> Iterator[None]:
    """Give objects, such as schedulers, the state that they have now if the block fails."""
    before = [
        (each, copy.deepcopy(each.state_dict()), set(getattr(each, "__dict__", ())))
        for each in objects
        if hasattr(each, "state_dict")
    ]
    try:
        yield
    except BaseException:
        for each, state, names in before:
            for name in set(getattr(each, "__dict__", ())) - names:
                delattr(each, name)
            each.load_state_dict(state)
        raise
