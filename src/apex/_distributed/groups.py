"""Creation of process groups and device meshes with the default group's timeout.

PyTorch gives a new group a timeout of 30 minutes (10 with NCCL), even if the user chose another for
`init_process_group`. If one rank stopped, the others would wait for that long.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..ops._host import HOST
from .comparison import ranks_of

# For each default group: the groups of `own_group` by ranks, and the number of groups of `make_local_group` by ranks.
_own: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
_made: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()
# Larger than the number of groups of any process.
_NUMBER_OFFSET = 1 << 14


def timeout_of(group: Any) -> timedelta | None:
    """Return how long a process of the group waits for others, or None if the backend does not tell."""
    try:
        return group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, IndexError, RuntimeError):
        return None


def make_group(ranks: Sequence[int] | None = None, **options: Any) -> Any:
    """Make a process group of these ranks (None: all); every process of the default group must call this.

    `options` are arguments of `torch.distributed.new_group`. The timeout is the default group's.
    """
    timeout = timeout_of(dist.group.WORLD)
    return dist.new_group(None if ranks is None else list(ranks), timeout=timeout, **options)


def make_local_group(ranks: Sequence[int]) -> Any:
    """Make a process group of these ranks; only these ranks must call this."""
    world: Any = dist.group.WORLD
    made = _made.setdefault(world, Counter())
    key = tuple(sorted(ranks))
    made[key] += 1
    with _numbered(_NUMBER_OFFSET + made[key]):
        return make_group(key, use_local_synchronization=True)


@contextlib.contextmanager
def _numbered(number: int) -> Iterator[None]:
    """Make PyTorch name the next group with local synchronization equally in all of its ranks.

    PyTorch makes the name from the ranks and from the number of groups of this process. Ranks in different numbers of
    groups would wait for each other forever, and the name of a destroyed group would lead to its closed connections.
    Placeholders raise the number of groups to `number`. PyTorch 2.15 takes the number of groups ever made instead and
    counts this one, too: later groups of all ranks would have other names in the ranks of this one.
    """
    world: Any = dist.distributed_c10d._world
    names, count = world.pg_names, world.group_count
    placeholders: list[Any] = [object() for _ in range(number - len(names))]
    names.update((placeholder, f"placeholder {index}") for index, placeholder in enumerate(placeholders))
    world.group_count = number
    try:
        yield
    finally:
        world.group_count = count
        for placeholder in placeholders:
            del names[placeholder]


def own_group(group: Any = None) -> Any:
    """Return a private group with the same ranks (None: all); each of these ranks must call this.

    During a backward pass, a process without some gradients sends buckets later than others. If users' collectives used
    the same group, their order would differ between processes, and results would be mixed up.
    """
    world: Any = dist.group.WORLD
    ranks = tuple(ranks_of(group))
    # With a bound device NCCL splits the communicator of all processes, which needs all of them.
    if len(ranks) == 1 or (len(ranks) < world.size() and getattr(world, "bound_device_id", None) is not None):
        return group
    made = _own.setdefault(world, {})
    if ranks not in made:
        # MPI can only make groups with all processes.
        made[ranks] = make_group(ranks) if dist.get_backend() == "mpi" else make_local_group(ranks)
    return made[ranks]


def make_mesh(device: str, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """Make a DeviceMesh of all processes in row-major order; every process of the default group must call this."""
    from torch.distributed.device_mesh import DeviceMesh

    world = dist.get_world_size()
    if math.prod(shape) != world:
        raise ValueError(f"a mesh of shape {shape} needs {math.prod(shape)} processes; there are {world}")
    if len(shape) == 1:
        assert dist.group.WORLD is not None
        return DeviceMesh.from_group(dist.group.WORLD, device, mesh_dim_names=names)
    mesh = torch.arange(world, dtype=torch.int32, device=HOST).view(shape)
    own = []
    for dim, size in enumerate(shape):
        groups = {tuple(ranks): make_group(ranks) for ranks in mesh.movedim(dim, -1).reshape(-1, size).tolist()}
        own += [group for ranks, group in groups.items() if dist.get_rank() in ranks]
    return DeviceMesh.from_group(own, device, mesh, mesh_dim_names=names)
