"""The process groups of DistributedFusedLAMB: processes of one machine divide the state, machines repeat it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ....ops._host import on_host
from .._zero.groups import Groups, timeout_of

# By world group; then by ranks, number and channels. Optimizers share them: a communicator takes memory on every device
# and cannot be given back one by one.
_made: WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Communicators:
    """`scatter` and `reduce` take turns with the buckets of gradients, `gather` with those of parameters.

    `reduce` goes over machines or, with a full all-reduce, over all processes.
    """

    groups: Groups
    gather: tuple[Any, ...]
    scatter: tuple[Any, ...]
    reduce: tuple[Any, ...]


def processes_that_divide(asked: int, world: int, on_machine: int) -> int:
    """How many processes divide the state; 0 asks for those of a machine, or all where that does not come out even."""
    if asked > 0:
        if world % asked:
            raise ValueError(f"dwu_group_size={asked} does not divide the {world} processes")
        return asked
    return on_machine if on_machine > 1 and world % on_machine == 0 else world


def processes_of_machine(param: torch.Tensor, from_launcher: int | None) -> int:
    """As torchrun says or, without it, the number of accelerators; 0 if neither is known."""
    if from_launcher is not None:
        return from_launcher
    return 0 if on_host(param) else torch.accelerator.device_count()


def make_communicators(
    size: int, *, full: bool, scatters: int, reduces: int, gathers: int, channels: int, verbose: bool
) -> Communicators:
    """Groups of `size` processes that divide the state; all processes make the same."""
    if not dist.is_available() or not dist.is_initialized():
        alone = Groups()
        return Communicators(alone, (None,), (None,), (None,))
    world = dist.get_world_size()
    rows = [list(range(first, first + size)) for first in range(0, world, size)]
    columns = [list(range(first, world, size)) for first in range(size)]
    scatter = tuple(_own(rows, number, 0, verbose) for number in range(scatters))
    redundant = _own(columns, 0, 0, verbose) if size < world else None
    reduce = (redundant,)
    if full or size < world:
        over = [list(range(world))] if full else columns
        reduce = tuple(_own(over, number, 0, verbose) for number in range(reduces))
    gather = tuple(_own(rows, scatters + number, channels, verbose) for number in range(gathers))
    return Communicators(Groups(None, scatter[0], redundant), gather or scatter, scatter, reduce)


def _own(every: list[list[int]], number: int, channels: int, verbose: bool) -> Any:
    """This process's group among `every`.

    Never the world group: clients use that between a backward pass and its step, when processes with all gradients have
    sent more than those that lack some, and a communicator needs the same order everywhere.
    """
    world = dist.group.WORLD
    assert world is not None
    made = _made.setdefault(world, {})
    timeout = timeout_of(world)
    own = None
    for ranks in every:
        key = (tuple(ranks), number, channels)
        if key not in made:
            made[key] = dist.new_group(ranks=ranks, timeout=timeout, pg_options=_options(channels, timeout))
            if verbose:
                print(f"DistributedFusedLAMB: process group {number} of ranks {ranks}")
        if dist.get_rank() in ranks:
            own = made[key]
    return own


def _options(channels: int, timeout: timedelta | None) -> Any:
    """Options of NCCL with at most so many channels, each of which takes a multiprocessor; None for other backends."""
    kind = getattr(dist, "ProcessGroupNCCL", None)
    if not channels or kind is None or dist.get_backend() != "nccl":
        return None
    options = kind.Options()
    options.config.max_ctas = channels
    if timeout is not None:
        options._timeout = timeout
    return options
