"""What processes that save together have to know of each other."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .._failures import explained


def is_connected() -> bool:
    return dist.is_available() and dist.is_initialized()


def is_first() -> bool:
    """Whether this process is rank 0, or alone."""
    return not is_connected() or dist.get_rank() == 0


def from_first(value: Any) -> Any:
    """A small object of rank 0, for all; called in all processes."""
    if not is_connected():
        return value
    box = [value]
    with explained("hearing of a checkpoint from rank 0"):
        dist.broadcast_object_list(box, 0)
    return box[0]


def raise_everywhere(failure: Exception | None, what: str) -> None:
    """Raises in all processes what went wrong in any of them; called in all, and none goes on before the last."""
    reasons: list[str | None] = [None if failure is None else f"{type(failure).__name__}: {failure}"]
    if is_connected():
        mine, reasons = reasons[0], [None] * dist.get_world_size()
        with explained("asking whether all ranks have written a checkpoint"):
            dist.all_gather_object(reasons, mine)
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise RuntimeError(f"{what}; rank {rank} had {reason}") from failure
