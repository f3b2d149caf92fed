"""Values that one of several processes computes for all: references that each would compute for itself otherwise."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def from_first_rank(make: Callable[[], T]) -> T:
    """Return what `make` returns in the first process, in all processes of the default group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    message: list[Any] = [None]
    if dist.get_rank() == 0:
        file = io.BytesIO()
        torch.save(make(), file)
        message = [file.getvalue()]
    dist.broadcast_object_list(message)
    return torch.load(io.BytesIO(message[0]), weights_only=False)
