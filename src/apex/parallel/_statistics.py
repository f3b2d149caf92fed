"""How the ranks of a batch norm exchange their rank statistics: one collective in each direction.

Where nothing is compiled backends are called directly: by way of `torch.distributed.all_reduce` and the dispatcher the
host is busy for 50 us of the 275 that it takes for a backward pass.
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

# What is said where other processes do not answer.
_GATHERING = "gathering the statistics of a batch norm over processes"
_ADDING = "adding up what a batch norm over processes needs for its gradients"


def process_count(group: dist.ProcessGroup | None) -> int:
    """Processes of a group, all there are where it is None; 0 where processes are not connected."""
    if not dist.is_available() or not dist.is_initialized():
        return 0
    # A group that this process is not in is a number. PyTorch's function takes as long as two launches.
    processes = dist.get_world_size(group) if group is None or isinstance(group, int) else group.size()
    if processes < 1:
        raise ValueError(f"process_group does not contain this process, rank {dist.get_rank()}")
    return processes


def exchange_of(group: dist.ProcessGroup | None) -> GroupExchange | None:
    """The `Exchange` of a group, by default of all processes; None where processes are not connected."""
    if group is None:
        group = dist.group.WORLD if dist.is_available() else None
        return None if group is None else GroupExchange(group)
    return GroupExchange(group) if process_count(group) else None


class GroupExchange(NamedTuple):
    """The `Exchange` of a process group; gradients of weight and bias are averaged over `averaged_ranks` if not 0."""

    group: dist.ProcessGroup
    averaged_ranks: int = 0

    def gather(self, rank_stats: Tensor) -> Tensor:
        """The rank statistics of all ranks, [P, 2C + 1]. One `all_gather`, which nothing waits for."""
        values = rank_stats.numel()
        gathered = rank_stats.new_empty(self.group.size() * values)  # flat, as Gloo wants it
        if torch.compiler.is_compiling():
            # The name that PyTorch 2.13 gave it, or the one before.
            all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            all_gather(gathered, rank_stats, group=self.group)
            return gathered.view(-1, values)
        backend = _backend_of(self.group, rank_stats.device)
        _run(_GATHERING, backend._allgather_base, gathered, rank_stats, _synchronous("AllgatherOptions"))
        return gathered.view(-1, values)

    def add_up(self, rank_stats: Tensor) -> None:
        """Makes rank statistics the sum of those of all ranks. One `all_reduce`."""
        if torch.compiler.is_compiling():
            dist.all_reduce(rank_stats, group=self.group)
            return
        backend = _backend_of(self.group, rank_stats.device)
        _run(_ADDING, backend.allreduce, [rank_stats], _synchronous("AllreduceOptions"))


# By default group, the norms whose first exchange has been compared; a copy or a loaded norm is compared again.
_compared: WeakKeyDictionary[Any, WeakSet[torch.nn.Module]] = WeakKeyDictionary()


def compare_first(norm: torch.nn.Module, exchange: GroupExchange, channels: int, input: Tensor) -> None:
    """Raise, in all ranks of a group, if the channels or statistics of a norm differ between them.

    Does so in the first exchange of each norm only: all ranks have it at the same time. Without this, Gloo ends
    processes that receive more than they expect, and NCCL waits forever.
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


def _run(what: str, collective: Callable[..., Any], *arguments: Any) -> None:
    """Runs a collective of a backend; `what` is said to have failed where other processes do not answer."""
    try:
        work = collective(*arguments)
        if work is not None:
            work.wait()
    except OWN:
        raise
    except RuntimeError as error:
        raise unanswered(what, error) from error


def _backend_of(group: Any, device: torch.device) -> Any:
    """The backend of a group for a device; the group itself where it has only one."""
    try:
        return group._get_backend(device)
    except (AttributeError, RuntimeError):
        return group


@functools.cache
def _synchronous(kind: str) -> Any:
    """Options of a collective for the stream that the caller is on, without another one in between, if PyTorch can."""
    options = getattr(dist.distributed_c10d, kind)()
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


# Groups of consecutive ranks by size, however many norms use them; by the group of all processes, since processes that
# were disconnected and connected again make new ones.
_made: WeakKeyDictionary[Any, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()


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
    if size == processes:
        return dist.group.WORLD
    groups = _made.setdefault(dist.group.WORLD, {})
    if size not in groups:
        groups[size] = new_consecutive_group(size, processes)
    return groups[size]


def consecutive_exchange(name: str, size: int) -> GroupExchange | None:
    """How this process's group exchanges rank statistics; gradients of weight and bias are averages over the group.

    They are so in upstream's compiled modules: with all that `DistributedDataParallel` averages, the gradients of the
    joined batch.
    """
    group = consecutive_group(name, size)
    return None if group is None else GroupExchange(group, size)


def new_consecutive_group(size: int, processes: int) -> dist.ProcessGroup:
    """Make a group of this process and its neighbours; every process takes part in making every group."""
    groups = [make_group(range(first, first + size)) for first in range(0, processes, size)]
    own = groups[dist.get_rank() // size]
    assert isinstance(own, dist.ProcessGroup)
    return own
