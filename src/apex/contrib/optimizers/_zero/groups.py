"""The process groups of an optimizer, a grid: state is sharded along one side and replicated along the other."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ...._distributed.comparison import check_same_everywhere, check_same_order
from ...._distributed.experts import is_expert
from ...._distributed.groups import make_group, timeout_of
from ....ops._host import on_host
from ....parallel._flat import broadcast_from_first

# Process groups by world group, then by ranks, number and channels. Optimizers share them, because a communicator takes
# memory on every device and cannot be freed alone.
_made: WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()


def own_world() -> Any:
    """Return a group of all processes for this package alone; None if there is one process."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    # DistributedFusedLAMB sends its buckets in another order, so it has groups with other numbers.
    return _own_group([list(range(dist.get_world_size()))], number=-1)


def _own_group(every: list[list[int]], number: int = 0, channels: int = 0, verbose: bool = False) -> Any:
    """Return this process's group among groups of the ranks in `every`; `number` counts groups of the same ranks.

    It is never the user's group. During a backward pass, processes that have all gradients have sent more buckets
    than others. The user's collectives on the same communicator would then be in another order in every process.
    """
    world = dist.group.WORLD
    assert world is not None
    made = _made.setdefault(world, {})
    own = None
    for ranks in every:
        key = (tuple(ranks), number, channels)
        if key not in made:
            made[key] = make_group(ranks, pg_options=_options(channels, timeout_of(world)))
            if verbose:
                print(f"DistributedFusedLAMB: process group {number} of ranks {ranks}")
        if dist.get_rank() in ranks:
            own = made[key]
    return own


def _options(channels: int, timeout: timedelta | None) -> Any:
    """Return NCCL options with at most `channels` channels (a channel takes one SM); None for other backends."""
    kind = getattr(dist, "ProcessGroupNCCL", None)
    if not channels or kind is None or dist.get_backend() != "nccl":
        return None
    options = kind.Options()
    options.config.max_ctas = channels
    if timeout is not None:
        options._timeout = timeout
    return options


class Groups:
    """Process groups: `process_group` is the product of `distributed` and `redundant`.

    `size` is the number of all processes. `ranks` processes divide the state, and `rank` is this process's rank among
    them. `replicas` processes hold the same shards. `root` is the global rank of the first process. Without
    torch.distributed there is one process.

    Consecutive buckets can use different communicators of the same ranks, so that they overlap: `scatter` in the
    reduce-scatter of gradients, `reduce` in the all-reduce over replicas, `gather` in the all-gather of parameters. By
    default there is one of each, `distributed` or `redundant`.
    """

    def __init__(
        self,
        process_group: Any = None,
        distributed: Any = None,
        redundant: Any = None,
        scatter: Sequence[Any] = (),
        reduce: Sequence[Any] = (),
        gather: Sequence[Any] = (),
    ) -> None:
        self.process_group, self.distributed, self.redundant = process_group, distributed, redundant
        self.size = self.ranks = self.replicas = 1
        self.rank = self.root = 0
        self.scatter = self.reduce = self.gather = (None,)
        if not dist.is_available() or not dist.is_initialized():
            return
        self.process_group = dist.group.WORLD if process_group is None else process_group
        self.distributed = self.process_group if distributed is None else distributed
        self.scatter = tuple(scatter) or (self.distributed,)
        self.reduce = tuple(reduce) or (redundant,)
        self.gather = tuple(gather) or self.scatter
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
        """Return whether there is one process, so that nothing is sent."""
        return self.size == 1

    def of_experts(self, group: Any) -> Groups:
        """Return the groups for experts that all processes of `group` hold; None if there are no experts."""
        return self if group is None or self.is_one else _OfExperts(group)


class _OfExperts(Groups):
    """Groups of experts in a model with other parameters; gradients go through buckets even in a group of one."""

    is_one = False  # type: ignore[assignment]


def processes_that_divide(asked: int, world: int, on_machine: int) -> int:
    """Return how many processes divide the state.

    `asked` = 0 means `on_machine`, the processes of a machine, or all if their number is no multiple of that.
    """
    if asked > 0:
        if world % asked:
            raise ValueError(f"dwu_group_size={asked} does not divide the {world} processes")
        return asked
    return on_machine if on_machine > 1 and world % on_machine == 0 else world


def processes_of_machine(param: torch.Tensor, from_launcher: int | None) -> int:
    """Return the number of processes on this machine.

    It comes from torchrun (`from_launcher`) or else is the number of accelerators; 0 if neither is known.
    """
    if from_launcher is not None:
        return from_launcher
    return 0 if on_host(param) else torch.accelerator.device_count()


def machine_groups(
    size: int, *, full: bool, scatters: int, reduces: int, gathers: int, channels: int, verbose: bool
) -> Groups:
    """Make groups of `size` processes that divide the state; all processes must make the same call.

    Buckets of gradients are reduced over machines or, if `full`, over all processes.
    """
    if not dist.is_available() or not dist.is_initialized():
        return Groups()
    world = dist.get_world_size()
    rows = [list(range(first, first + size)) for first in range(0, world, size)]
    columns = [list(range(first, world, size)) for first in range(size)]
    scatter = [_own_group(rows, number, verbose=verbose) for number in range(scatters)]
    redundant = _own_group(columns, verbose=verbose) if size < world else None
    over = [list(range(world))] if full else columns
    count = reduces if full or size < world else 0
    reduce = [_own_group(over, number, verbose=verbose) for number in range(count)]
    gather = [_own_group(rows, scatters + number, channels, verbose) for number in range(gathers)]
    return Groups(None, scatter[0], redundant, scatter, reduce, gather)


@torch.no_grad()
def broadcast_params(
    param_groups: Sequence[dict[str, Any]], first: int, processes: Any, options: Any, skips_experts: bool = False
) -> None:
    """Give the parameters of groups from index `first` on, without experts if asked, the values of the first process.

    Raise an error in all processes if their parameters, the parameters' order or the `options` differ, because the
    layout of shards follows from them. Parameters are compared by their names if they have names, else by shapes, and
    by values if processes start with the same values.
    """
    named = []
    for number, group in enumerate(param_groups[first:], first):
        names = group.get("param_names") or [""] * len(group["params"])
        for index, (name, param) in enumerate(zip(names, group["params"], strict=True)):
            if skips_experts and is_expert(param):
                continue
            named.append((f"{name!r} ({index} of group {number})" if name else f"{index} of group {number}", param))
    check_same_everywhere(named, "optimizers", processes, options)
    check_same_order(named, "optimizers", processes)
    broadcast_from_first([param for _, param in named], processes)
