"""Exchanges of statistics among ranks that share the classes of a linear head."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..._distributed import exchange
from ...ops.xentropy.rows import make_exchange

_WHAT = "a linear head whose classes several ranks share"


class GroupExchange:
    """The exchanges of one process group."""

    def __init__(self, name: str) -> None:
        self.group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)

    def start_gather(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Start to gather the ranks' tensors along the first dimension; return the result and its work."""
        return exchange.start_gather(tensor, self.group, _WHAT)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks, which may overwrite the tensor."""
        total, work = exchange.start_sum_in_place(tensor.contiguous(), self.group, _WHAT)
        work.wait()
        return total

    def sum_of_part(self, tensor: Tensor) -> Tensor:
        """Return this rank's part, along the first dimension, of the sum over the ranks."""
        part, work = exchange.start_sum_of_part(tensor, self.group, _WHAT)
        work.wait()
        return part


make_exchange[:] = [GroupExchange]
