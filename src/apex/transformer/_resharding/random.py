"""Random number states in checkpoints."""

from __future__ import annotations

import logging
import zlib
from typing import Any

import torch.distributed as dist

from ..._distributed.collectives import gather_objects
from ..._random import host_states, restore_host_states, seed_host
from ...checkpoint._ranks import is_connected, is_first
from .. import parallel_state
from .._groups.device import parameter_device
from ..tensor_parallel.random import _RandomState, model_parallel_cuda_manual_seed

logger = logging.getLogger("apex.transformer")

# Distance between the seeds of ranks. Tensor-parallel neighbours have consecutive seeds within it.
_SEED_STRIDE = 1 << 16


def layout(chunks: int) -> dict[str, Any]:
    """Return the sizes of all dimensions, the number of chunks and the device; random states resume if all match."""
    sizes = dict(zip(("pipeline", "data", "context", "tensor"), (size for size, _ in _coordinates()), strict=True))
    if not parallel_state.is_unitialized():
        experts, parts = (
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
        if experts > 1 or parts != sizes["tensor"]:
            sizes.update(expert=experts, expert_tensor=parts)
    return {**sizes, "chunks": chunks, "device": parameter_device().type}


def _coordinates() -> list[tuple[int, int]]:
    """Return (size, rank) of this process in the pipeline, data, context and tensor dimensions."""
    if not parallel_state.is_unitialized():
        groups = (
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_data_parallel_group(),
            parallel_state.get_context_parallel_group(),
            parallel_state.get_tensor_model_parallel_group(),
        )
        return [(dist.get_world_size(group), dist.get_rank(group)) for group in groups]
    replica = (dist.get_world_size(), dist.get_rank()) if is_connected() else (1, 0)
    return [(1, 0), replica, (1, 0), (1, 0)]


def key() -> str:
    """Return the name of this process's random states in a checkpoint."""
    return "random." + ".".join(str(rank) for _, rank in _coordinates())


def states() -> dict[str, Any]:
    """Return the states of all random number streams of this process."""
    state = _RandomState()
    return {**vars(state), "seeds": sorted(state.seeds), **host_states()}


def seed_from(saved: dict[str, Any]) -> int:
    """Return a seed that depends only on the saved states."""
    return zlib.crc32(saved["host"].numpy().tobytes())


def restore(saved: dict[str, Any]) -> None:
    """Restore the random number streams from the result of `states`."""
    state = _RandomState()
    vars(state).update({name: saved[name] for name in vars(state)} | {"seeds": set(saved["seeds"])})
    state.restore()
    restore_host_states(saved)


def gathered(chunks: int) -> dict[str, Any]:
    """Return the states of all processes, which all of them must call, for a file that the first one writes."""
    own = states()
    everywhere = gather_objects((key(), own), "gathering states of random numbers")
    return {"layout": layout(chunks), "seed": seed_from(everywhere[0][1]), "states": dict(everywhere)}


def restore_own(saved: dict[str, Any], chunks: int) -> None:
    """Restore this process's streams from the result of `gathered`, or seed them anew if the layout is another."""
    now = layout(chunks)
    if saved["layout"] == now:
        restore(saved["states"][key()])
    else:
        seed_anew(saved["seed"], saved["layout"], now)


def seed_anew(seed: int, saved_layout: dict[str, Any], layout: dict[str, Any]) -> None:
    """Seed all streams anew, and log a warning."""
    index = 0
    for size, rank in _coordinates()[:-1]:
        index = index * size + rank
    seed += _SEED_STRIDE * index
    seed_host(seed)
    if not parallel_state.is_unitialized():
        model_parallel_cuda_manual_seed(seed)
    if is_first():
        logger.warning(
            "random numbers begin anew from seed %d: the checkpoint is of %s, not %s", seed, saved_layout, layout
        )
