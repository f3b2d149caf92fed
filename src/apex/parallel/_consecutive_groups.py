"""The groups of consecutive ranks that norms share statistics in: one per size, however many norms there are."""

from __future__ import annotations

import torch.distributed as dist

from ._statistics import GroupExchange

# All processes, and the groups made of them: processes that were disconnected and connected again make new ones.
_made: tuple[dist.ProcessGroup | None, dict[int, dist.ProcessGroup]] = (None, {})


def consecutive_group(name: str, size: int) -> dist.ProcessGroup | None:
    """This process's group where all are cut into groups of `size` consecutive ranks; None where it is by itself.

    `name` is what the caller's argument is called. The first call with a size makes groups, in which all processes must
    take part.
    """
    if size < 1:
        raise ValueError(f"{name}={size} must be at least 1")
    if size == 1:
        return None
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            f"{name}={size} needs connected processes: call torch.distributed.init_process_group first; {name}=1, each "
            "process by itself, does not"
        )
    processes = dist.get_world_size()
    if processes % size:
        raise ValueError(f"{name}={size} must divide the number of processes, {processes}")
    global _made
    if _made[0] is not dist.group.WORLD:
        _made = (dist.group.WORLD, {})
    groups = _made[1]
    if size not in groups:
        groups[size] = _new_group(size, processes)
    return groups[size]


def consecutive_exchange(name: str, size: int) -> GroupExchange | None:
    """How this process's group exchanges rank statistics; gradients of weight and bias are averages over the group.

    They are so in upstream's compiled modules: with all that `DistributedDataParallel` averages, the gradients of the
    joined batch.
    """
    group = consecutive_group(name, size)
    return None if group is None else GroupExchange(group, size)


def _new_group(size: int, processes: int) -> dist.ProcessGroup:
    if size == processes:
        assert dist.group.WORLD is not None  # processes are connected
        return dist.group.WORLD
    return new_consecutive_group(size, processes)


def new_consecutive_group(size: int, processes: int) -> dist.ProcessGroup:
    """A new group of this process and its neighbours; every process takes part in making every group."""
    groups = [dist.new_group(range(first, first + size)) for first in range(0, processes, size)]
    own = groups[dist.get_rank() // size]
    assert isinstance(own, dist.ProcessGroup)
    return own
