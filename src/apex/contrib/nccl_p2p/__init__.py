"""Halo exchange by messages between neighbouring ranks; upstream's communicators are process groups of any backend."""

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

_groups: list[Any] = []  # indexed by handle; never freed, like upstream's


def get_unique_nccl_id(n: int) -> Tensor:
    """Return `n` identifiers, uint8 [n, 128], for one rank to send to all; their content is not used here."""
    return torch.randint(256, (n, 128), dtype=torch.uint8, device=HOST)


def init_nccl_comm(unique_nccl_id: Tensor, my_rank: int, num_ranks: int) -> int:
    """Return a communicator handle for the ranks below `num_ranks`, which must all call this function."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if my_rank != rank or not 1 <= num_ranks <= size:
        raise ValueError(f"my_rank={my_rank}, num_ranks={num_ranks}: this is rank {rank} of {size} processes")
    _groups.append(group_of(range(num_ranks)))
    return len(_groups) - 1


def left_right_halo_exchange_inplace(handle: int, left_rank: int, right_rank: int, *halos: Tensor) -> None:
    """Send the first two of `halos` and fill the other two; at an edge of the image (rank -1) fill with zeros."""
    if not 0 <= handle < len(_groups):
        raise ValueError(f"handle={handle} is not one of the {len(_groups)} that init_nccl_comm has returned")
    exchange_by_messages(halos[:2], halos[2:], (left_rank, right_rank), _groups[handle])


def left_right_halo_exchange(
    handle: int, left_rank: int, right_rank: int, left_output_halo: Tensor, right_output_halo: Tensor
) -> list[Tensor]:
    """Send the output halos and return the halos received from the left and from the right."""
    inputs = [torch.empty_like(left_output_halo), torch.empty_like(right_output_halo)]
    left_right_halo_exchange_inplace(handle, left_rank, right_rank, left_output_halo, right_output_halo, *inputs)
    return inputs


def add_delay(delay: int) -> None:
    """Keep the GPU's queue, or without a GPU this process, busy for about `delay` nanoseconds; for tests of overlap."""
    if torch.cuda.is_available():
        torch.cuda._sleep(2 * delay)  # in cycles; a GPU runs about two in a nanosecond
    else:
        time.sleep(delay * 1e-9)
