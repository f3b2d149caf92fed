"""Random numbers that go on after a checkpoint was loaded."""

from __future__ import annotations

import logging
import zlib
from typing import Any

import torch
import torch.distributed as dist

from ...checkpoint._ranks import is_connected, is_first
from .. import parallel_state
from .._groups.device import parameter_device
from ..tensor_parallel.random import _RandomState, model_parallel_cuda_manual_seed

logger = logging.getLogger("apex.transformer")

# Between the seeds of ranks that are no tensor-parallel neighbours, whose own streams have consecutive seeds.
_SEEDS = 1 << 16


def layout(chunks: int) -> dict[str, Any]:
    """What processes there are, and where parameters lie: random numbers go on where it is the same."""
    found = dict(zip(("pipeline", "data", "context", "tensor"), (size for size, _ in _places()), strict=True))
    return {**found, "chunks": chunks, "device": parameter_device().type}


def _places() -> list[tuple[int, int]]:
    """(how many, which) of this process among stages, replicas, parts of a sequence and parts of layers."""
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
    """The name of this process's states in a checkpoint."""
    return "random." + ".".join(str(rank) for _, rank in _places())


def states() -> dict[str, Any]:
    """The states of all streams of random numbers of this process."""
    found = _RandomState()
    return {**vars(found), "seeds": sorted(found.seeds)}


def seed_from(saved: dict[str, Any]) -> int:
    """A seed that depends on the states alone."""
    return zlib.crc32(saved["host"].numpy().tobytes())


def restore(saved: dict[str, Any]) -> None:
    """Goes on from what `states` gave."""
    found = _RandomState()
    vars(found).update({**saved, "seeds": set(saved["seeds"])})
    found.restore()


def seed_anew(seed: int, then: dict[str, Any], now: dict[str, Any]) -> None:
    """Seeds all streams, and says so."""
    place = 0
    for size, rank in _places()[:-1]:
        place = place * size + rank
    seed += _SEEDS * place
    torch.default_generator.manual_seed(seed)
    if not parallel_state.is_unitialized():
        model_parallel_cuda_manual_seed(seed)
    if is_first():
        logger.warning("random numbers begin anew from seed %d: the checkpoint is of %s, not %s", seed, then, now)
