"""Exchange of halos with neighbouring ranks: the outer rows of an image whose rows are split over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._failures import explained
from ..ops._host import HOST, on_host
from .exchange import check_alike
from .groups import make_local_group


def group_of(ranks: Sequence[int]) -> Any:
    """Return a new process group of these ranks, or None for a single rank; all of them must call this."""
    if len(ranks) == 1:
        return None
    if not dist.is_initialized():
        raise RuntimeError(f"ranks {list(ranks)} need torch.distributed.init_process_group first")
    if dist.get_rank() not in ranks:
        raise ValueError(f"rank {dist.get_rank()} is not one of ranks={list(ranks)}")
    return make_local_group(ranks)


def exchange_by_messages(sent: Sequence[Tensor], received: Sequence[Tensor], ranks: Sequence[int], group: Any) -> None:
    """Send a halo to each of two ranks, and fill `received` with theirs; rank -1 is an outer edge and gives zeros."""
    description = f"the exchange of halos with ranks {', '.join(str(rank) for rank in ranks if rank >= 0)}"
    through_host = group is not None and dist.get_backend(group) == dist.Backend.GLOO and not on_host(sent[0])
    if group is not None:
        check_alike(sent[0], group, description)
    operations, arrivals = [], []
    for rank, halo, target in zip(ranks, sent, received, strict=True):
        if rank < 0:
            target.zero_()
            continue
        values = halo.to(HOST) if through_host else halo
        values = values.contiguous()
        arrival = torch.empty_like(values)
        # Sent as bytes, because Gloo has no bfloat16.
        operations += [
            dist.P2POp(dist.isend, values.view(-1).view(torch.uint8), rank, group),
            dist.P2POp(dist.irecv, arrival.view(-1).view(torch.uint8), rank, group),
        ]
        arrivals.append((target, arrival))
    if operations:
        with explained(description):
            for work in dist.batch_isend_irecv(operations):
                work.wait()
    for target, arrival in arrivals:
        target.copy_(arrival)
