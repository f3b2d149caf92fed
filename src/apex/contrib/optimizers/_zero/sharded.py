"""State as sharded tensors, for torch.distributed.checkpoint: saved by as many processes, loaded by any number.

Every parameter's state is a tensor of one dimension, its elements in the order of the parameter's memory, of which each
rank has the stretches that it owns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .arena import Arena
from .layout import Piece, merge_adjacent
from .saved import State, StateLoader, Stretch, by_param, names_of


def sharded(states: Sequence[State], key_of: Callable[[Tensor], str]) -> dict[str, dict[str, Any]]:
    """By parameter and name; what can be is a view of the state itself."""
    found: dict[str, dict[str, Any]] = {}
    for state in states:
        arena = state.arena
        everywhere = [by_param(merge_adjacent(arena.layout.owned_by(rank))) for rank in range(arena.groups.ranks)]
        for name in names_of(state):
            values = state.read(name)
            for index, param in enumerate(arena.params):
                of_param = [parts.get(index, []) for parts in everywhere]
                found.setdefault(key_of(param), {})[name] = _tensor(arena, index, of_param, values)
    return found


def own_stretches(states: Sequence[State]) -> list[Stretch]:
    """What this rank owns of every parameter's state; what can be is a view of the state itself."""
    return [
        (state.arena.params[part.param], name, part.start, values[part.flat : part.flat + part.size])
        for state in states
        for name in names_of(state)
        for values in (state.read(name),)
        for part in merge_adjacent(state.arena.parts)
    ]


def _tensor(arena: Arena, index: int, parts: Sequence[Sequence[Piece]], values: Tensor) -> Any:
    size = arena.layout.sizes[index]
    mine = parts[arena.groups.rank]
    if not size:
        return values[:0]
    if arena.groups.ranks == 1:
        return values[mine[0].flat : mine[0].flat + size]
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
    from torch.distributed._shard.sharding_spec import ShardMetadata

    device = "cpu" if arena.device.type == "cpu" else f"{arena.device.type}:{arena.device.index or 0}"
    ranks = dist.get_process_group_ranks(arena.groups.distributed)
    shards = [
        ShardMetadata([part.start], [part.size], f"rank:{ranks[rank]}/{device}")
        for rank, of_rank in enumerate(parts)
        for part in of_rank
    ]
    here = f"rank:{ranks[arena.groups.rank]}/{device}"
    local = [
        Shard(values[part.flat : part.flat + part.size], ShardMetadata([part.start], [part.size], here))
        for part in mine
    ]
    properties = TensorProperties(dtype=values.dtype, layout=torch.strided, requires_grad=False)
    metadata = ShardedTensorMetadata(shards, torch.Size([size]), properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local, metadata, process_group=arena.groups.distributed
    )


def restore(states: Sequence[State], saved: dict[str, dict[str, Any]], key_of: Callable[[Tensor], str]) -> None:
    """Puts back what `sharded` gave, or what was loaded into it."""
    loader = StateLoader(states)
    for state in states:
        for param in state.arena.params:
            for name in names_of(state):
                loader.add(_stretches(param, name, saved[key_of(param)][name]))
    loader.finish()


def _stretches(param: Tensor, name: str, tensor: Any) -> list[Stretch]:
    if isinstance(tensor, Tensor) and not hasattr(tensor, "local_shards"):
        return [(param, name, 0, tensor)]
    return [(param, name, shard.metadata.shard_offsets[0], shard.tensor) for shard in tensor.local_shards()]
