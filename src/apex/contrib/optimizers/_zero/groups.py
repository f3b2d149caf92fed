"""The processes of an optimizer, as a grid: state is divided along one side and repeated along the other."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ...._distributed.comparison import check_same_everywhere, check_same_order
from ....parallel._flat import broadcast_from_first

# By world group: optimizers share it, because a communicator takes memory on every device.
_own: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def own_world() -> Any:
    """A group of all processes that clients do not use; None where torch.distributed is not initialised.

    During a backward pass processes with all gradients have sent more than those that lack some. Were a client's
    collectives of the same pass in between, on the same communicator, their order would not be the same everywhere.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    world = dist.group.WORLD
    if world not in _own:
        _own[world] = dist.new_group(timeout=timeout_of(world))
    return _own[world]


def timeout_of(group: Any) -> timedelta | None:
    """How long a process waits for others; None if the backend does not tell."""
    try:
        return group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, IndexError, RuntimeError):
        return None


class Groups:
    """`process_group` = `distributed` x `redundant`; a world of one where torch.distributed is not initialised.

    `size` is the number of all processes, `ranks` of those that divide the state, `rank` the number of this one among
    them, `replicas` of those that hold the same shards. `root` is the global rank of the first process.
    """

    def __init__(self, process_group: Any = None, distributed: Any = None, redundant: Any = None) -> None:
        self.process_group, self.distributed, self.redundant = process_group, distributed, redundant
        self.size = self.ranks = self.replicas = 1
        self.rank = self.root = 0
        if not dist.is_available() or not dist.is_initialized():
            return
        self.process_group = dist.group.WORLD if process_group is None else process_group
        self.distributed = self.process_group if distributed is None else distributed
        self.size = dist.get_world_size(self.process_group)
        self.ranks = dist.get_world_size(self.distributed)
        self.rank = dist.get_rank(self.distributed)
        if redundant is not None:
            self.replicas = dist.get_world_size(redundant)
        if self.rank < 0 or self.size < 0 or self.replicas < 0:
            raise ValueError(
                "this process is in none, or not in all, of process_group, distributed_process_group and "
                "redundant_process_group"
            )
        if self.size != self.ranks * self.replicas:
            raise RuntimeError(
                f"process_group has {self.size} processes; distributed_process_group's {self.ranks} times "
                f"redundant_process_group's {self.replicas} are {self.ranks * self.replicas}"
            )
        self.root = dist.get_global_rank(self.process_group, 0)

    @property
    def is_one(self) -> bool:
        """Whether there is nobody to exchange anything with."""
        return self.size == 1


@torch.no_grad()
def broadcast_params(param_groups: Sequence[dict[str, Any]], first: int, processes: Any, options: Any) -> None:
    """Gives the parameters of groups from `first` on the values that the first process has.

    Raises, in all processes, unless they have the same parameters in the same order: what each owns and sends follows
    from that order, and from `options`. Parameters that were given with names are compared by them; others by shapes,
    and by their values where processes start with the same.
    """
    named = []
    for number, group in enumerate(param_groups[first:], first):
        names = group.get("param_names") or [""] * len(group["params"])
        for index, (name, param) in enumerate(zip(names, group["params"], strict=True)):
            named.append((f"{name!r} ({index} of group {number})" if name else f"{index} of group {number}", param))
    check_same_everywhere(named, "optimizers", processes, options)
    check_same_order(named, "optimizers", processes)
    broadcast_from_first([param for _, param in named], processes)
