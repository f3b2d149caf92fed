"""Halos by messages between neighbouring ranks, with upstream's communicators: here process groups of any backend."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._distributed.neighbours import exchange_by_messages, group_of
from ...ops._host import HOST

__all__ = [
    "add_delay",
    "get_unique_nccl_id",
    "init_nccl_comm",
    "left_right_halo_exchange",
    "left_right_halo_exchange_inplace",
]

_groups: list[Any] = []  # by handle; never freed, like upstream's


def get_unique_nccl_id(n: int) -> Tensor:
    """`n` identifiers, uint8 [n, 128], for one rank to send to all; nothing is read from them here."""
    return torch.randint(256, (n, 128), dtype=torch.uint8, device=HOST)


def init_nccl_comm(unique_nccl_id: Tensor, my_rank: int, num_ranks: int) -> int:
    """A handle for the ranks below `num_ranks`, all of which must call it."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if my_rank != rank or not 1 <= num_ranks <= size:
        raise ValueError(f"my_rank={my_rank}, num_ranks={num_ranks}: this is rank {rank} of {size} processes")
    _groups.append(group_of(range(num_ranks)))
    return len(_groups) - 1


def left_right_halo_exchange_inplace(handle: int, left_rank: int, right_rank: int, *halos: Tensor) -> None:
    """Sends the first two of `halos` and fills the other two; a rank of -1 is an outer edge, from which zeros come."""
    if not 0 <= handle < len(_groups):
        raise ValueError(f"handle={handle} is not one of the {len(_groups)} that init_nccl_comm has returned")
    exchange_by_messages(halos[:2], halos[2:], (left_rank, right_rank), _groups[handle])


def left_right_halo_exchange(
    handle: int, left_rank: int, right_rank: int, left_output_halo: Tensor, right_output_halo: Tensor
) -> list[Tensor]:
    """Sends the outputs and returns what came from the left and from the right."""
    inputs = [torch.empty_like(left_output_halo), torch.empty_like(right_output_halo)]
    left_right_halo_exchange_inplace(handle, left_rank, right_rank, left_output_halo, right_output_halo, *inputs)
    return inputs


def add_delay(delay: int) -> None:
    """Keeps the accelerator's queue, else this process, busy for about `delay` nanoseconds; for tests of overlap."""
    if torch.cuda.is_available():
        torch.cuda._sleep(2 * delay)  # cycles, of which a GPU has about two in a nanosecond
    else:
        time.sleep(delay * 1e-9)
