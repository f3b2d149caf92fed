"""What processes that save together have to know of each other."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .._failures import explained


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
