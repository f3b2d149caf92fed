"""Exchange of rank statistics between the processes of a batch norm: one collective in each direction.

In eager mode backends are called directly. Through `torch.distributed.all_reduce` and the dispatcher the host would be
busy for 50 us of the 275 us of a backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from .._distributed.comparison import check_settings
from .._distributed.groups import make_group
from .._failures import OWN, unanswered
from ..ops._library import compute_dtype

# Descriptions for errors when other processes do not answer.
_GATHERING = "gathering the statistics of a batch norm over processes"
_ADDING = "adding up what a batch norm over processes needs for its gradients"


def process_count(group: dist.ProcessGroup | None) -> int:
    """Return the number of processes of a group (None: all), or 0 without a process group."""
    if not dist.is_available() or not dist.is_initialized():
        return 0
    # A group without this process is an int. `group.size()` saves the time of two kernel launches over get_world_size.
    processes = dist.get_world_size(group) if group is None or isinstance(group, int) else group.size()
    if processes < 1:
        raise ValueError(f"process_group does not contain this process, rank {dist.get_rank()}")
    return processes


def exchange_of(group: dist.ProcessGroup | None) -> GroupExchange | None:
    """Return the exchange of a group (default: all processes), or None without a process group."""
    if group is None:
        group = dist.group.WORLD if dist.is_available() else None
        return None if group is None else GroupExchange(group)
    return GroupExchange(group) if process_count(group) else None


class GroupExchange(NamedTuple):
    """The exchange of a process group; weight and bias gradients are averaged over `averaged_ranks` if it is not 0."""

    group: dist.ProcessGroup
    averaged_ranks: int = 0

    def gather(self, rank_stats: Tensor) -> Tensor:
        """Return the rank statistics of all ranks, [P, 2C + 1], with one `all_gather`; the host does not wait."""
        values = rank_stats.numel()
        gathered = rank_stats.new_empty(self.group.size() * values)  # flat, because Gloo requires it
        if torch.compiler.is_compiling():
            # PyTorch 2.13 renamed all_gather_into_tensor.
            all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            all_gather(gathered, rank_stats, group=self.group)
            return gathered.view(-1, values)
        backend = _backend_of(self.group, rank_stats.device)
        _run(_GATHERING, backend._allgather_base, gathered, rank_stats, _synchronous("AllgatherOptions"))
        return gathered.view(-1, values)

    def add_up(self, rank_stats: Tensor) -> None:
        """Sum rank statistics over all ranks in place, with one `all_reduce`."""
        if torch.compiler.is_compiling():
            dist.all_reduce(rank_stats, group=self.group)
            return
        backend = _backend_of(self.group, rank_stats.device)
        _run(_ADDING, backend.allreduce, [rank_stats], _synchronous("AllreduceOptions"))


# Norms whose first exchange has been compared, by default group. A copied or loaded norm is compared again.
_compared: WeakKeyDictionary[Any, WeakSet[torch.nn.Module]] = WeakKeyDictionary()


def compare_first(norm: torch.nn.Module, exchange: GroupExchange, channels: int, input: Tensor) -> None:
    """Raise in all ranks of a group if a norm's channels or statistics differ between them.

    Only the first exchange of each norm is compared, because all ranks reach it at the same time. Without the
    comparison Gloo would end processes that receive more than they expect, and NCCL would wait forever.
    """
    world: Any = dist.group.WORLD
    compared = _compared.get(world)
    if compared is None:
        compared = _compared[world] = WeakSet()
    if norm in compared or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        return
    compared.add(norm)
    settings = {"number of channels": channels, "dtype of statistics": compute_dtype(input)}
    check_settings(settings, f"inputs of a {type(norm).__name__}", exchange.group, [input])


def _run(description: str, collective: Callable[..., Any], *arguments: Any) -> None:
    """Run a collective of a backend; name `description` in the error if other processes do not answer."""
    try:
        work = collective(*arguments)
        if work is not None:
            work.wait()
    except OWN:
        raise
    except RuntimeError as error:
        raise unanswered(description, error) from error


def _backend_of(group: Any, device: torch.device) -> Any:
    """Return the backend of a group for a device, or the group itself if it has only one."""
    try:
        return group._get_backend(device)
    except (AttributeError, RuntimeError):
        return group


@functools.cache
def _synchronous(kind: str) -> Any:
    """Return options that run a collective on the caller's stream, if PyTorch supports it."""
    options = getattr(dist.distributed_c10d, kind)()
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


# Groups of consecutive ranks by size, shared by all norms. Keyed by the default group, because reconnected processes
# need new groups.
_made: WeakKeyDictionary[Any, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()


def consecutive_group(name: str, size: int) -> dist.ProcessGroup | None:
    """Return this process's group if all processes are cut into groups of `size` consecutive ranks, or None for size 1.

    `name` is the caller's argument, for errors. The first call with a size creates groups, so all processes must make
    it.
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
    if size == processes:
        return dist.group.WORLD
    groups = _made.setdefault(dist.group.WORLD, {})
    if size not in groups:
        groups[size] = new_consecutive_group(size, processes)
    return groups[size]


def consecutive_exchange(name: str, size: int) -> GroupExchange | None:
    """Return the exchange of this process's group of consecutive ranks; it averages weight and bias gradients.

    Upstream's compiled modules average them too: `DistributedDataParallel` then yields the gradients of the joined
    batch.
    """
    group = consecutive_group(name, size)
    return None if group is None else GroupExchange(group, size)


def new_consecutive_group(size: int, processes: int) -> dist.ProcessGroup:
    """Make a group of this process and its neighbours; every process takes part in making every group."""
    groups = [make_group(range(first, first + size)) for first in range(0, processes, size)]
    group = groups[dist.get_rank() // size]
    assert isinstance(group, dist.ProcessGroup)
    return group
