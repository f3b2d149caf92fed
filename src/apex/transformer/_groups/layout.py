"""Groups of ranks of a model that is split over processes, as lists of ranks.

A mesh is a tensor of ranks with the dimensions pipeline, data, context, tensor. By default tensor-parallel ranks are
neighbours, followed by the ranks that share a sequence, the replicas and the pipeline stages. All functions here only
compute lists; they need no processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MESH_DIMENSIONS = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class ParallelSizes:
    """The number of parts of a model in each dimension; `data` follows from the number of processes."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1


def parallel_sizes(
    world: int, tensor: int, pipeline: int, context: int = 1, expert: int = 1, expert_tensor: int | None = None
) -> ParallelSizes:
    """Return the sizes for `world` processes; raise a RuntimeError that names the size that does not fit.

    By default each expert is split like other layers.
    """
    expert_tensor = tensor if expert_tensor is None else expert_tensor
    requested = {
        "tensor": tensor,
        "pipeline": pipeline,
        "context": context,
        "expert": expert,
        "expert tensor": expert_tensor,
    }
    for name, size in requested.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} model parallel size must be a positive integer, got {size!r}")
    model = tensor * pipeline * context
    if world % model:
        raise RuntimeError(
            f"`world_size` ({world}) is not divisible by tensor_model_parallel_size ({tensor}) x "
            f"pipeline_model_parallel_size ({pipeline}) x context_parallel_size ({context})"
        )
    stage = world // pipeline
    if stage % expert_tensor:
        raise RuntimeError(
            f"expert_tensor_parallel_size ({expert_tensor}) must divide the {stage} ranks of a pipeline stage"
        )
    if (stage // expert_tensor) % expert:
        raise RuntimeError(
            f"expert_model_parallel_size ({expert}) must divide the {stage // expert_tensor} ranks of a pipeline stage "
            f"that hold the same part of an expert, {stage} ranks by expert_tensor_parallel_size ({expert_tensor}); "
            "expert_tensor_parallel_size=1 keeps experts whole"
        )
    return ParallelSizes(tensor, pipeline, world // model, context, expert, expert_tensor)


def default_mesh(sizes: ParallelSizes) -> Tensor:
    """Return the mesh of ranks [pipeline, data, context, tensor], with tensor-parallel ranks adjacent."""
    shape = (sizes.pipeline, sizes.data, sizes.context, sizes.tensor)
    ranks = math.prod(shape)
    return torch.arange(ranks, dtype=torch.int64, device="cpu").view(shape)


def mesh_from_device_mesh(device_mesh: Any, world: int) -> Tensor:
    """Return the ranks of a DeviceMesh as [pp, dp, cp, tp]; a missing dimension has size 1."""
    if not hasattr(device_mesh, "mesh_dim_names"):
        raise TypeError(f"device_mesh must be a DeviceMesh or None, got {device_mesh!r:.80}")
    names = tuple(device_mesh.mesh_dim_names or ())
    unknown = [name for name in names if name not in MESH_DIMENSIONS]
    if not names or unknown or len(set(names)) != len(names):
        raise ValueError(f"the dimensions of device_mesh must be named among {MESH_DIMENSIONS}, got {names}")
    ranks = device_mesh.mesh.cpu()
    if sorted(ranks.flatten().tolist()) != list(range(world)):
        raise ValueError(f"device_mesh must have each of the {world} ranks once, got {ranks.tolist()}")
    order = [names.index(name) for name in MESH_DIMENSIONS if name in names]
    sizes = [ranks.shape[names.index(name)] if name in names else 1 for name in MESH_DIMENSIONS]
    return ranks.permute(order).reshape(sizes)


def check_stages(stages: int, virtual: int | None, split: int | None) -> None:
    """Raise if a pipeline of `stages` stages cannot have `virtual` chunks each or a decoder that starts at `split`."""
    if virtual is not None:
        if virtual < 1:
            raise ValueError(f"virtual_pipeline_model_parallel_size_ must be positive, got {virtual}")
        if stages < 2:
            raise RuntimeError(f"interleaving needs at least 2 pipeline stages, got {stages}")
    if split is not None and not 0 <= split < max(stages, 2):
        raise ValueError(f"pipeline_model_parallel_split_rank_ must be a stage, 0 to {stages - 1}, got {split}")


def rank_groups(
    mesh: Tensor, expert: int = 1, split: int | None = None, expert_tensor: int | None = None
) -> dict[str, list[list[int]]]:
    """Return the groups of every kind as disjoint lists of ranks.

    The ranks of a stage, in the order of the mesh, are also a mesh of copies of experts, experts, parts of an expert.
    A rank may be in none of the embedding groups. `split` is the stage where the decoder of an encoder-decoder begins.
    """
    stages, data, context, tensor = mesh.shape
    pipelines = _lists(mesh.permute(1, 2, 3, 0), stages)
    last = stages - 1
    part = tensor if expert_tensor is None else expert_tensor
    experts = mesh.reshape(stages, -1, expert, part)
    copies = experts.shape[1]
    middle = [] if split is None else [split]
    return {
        "tensor": _lists(mesh, tensor),
        "pipeline": pipelines,
        "data": _lists(mesh.permute(0, 2, 3, 1), data),
        "model": _lists(mesh.permute(1, 2, 0, 3), stages * tensor),
        "context": _lists(mesh.permute(0, 1, 3, 2), context),
        "data_with_context": _lists(mesh.permute(0, 3, 1, 2), data * context),
        "tensor_context": _lists(mesh, context * tensor),
        "tensor_data": _lists(mesh.permute(0, 2, 1, 3), data * tensor),
        "tensor_data_context": _lists(mesh, data * context * tensor),
        "expert": _lists(experts.transpose(2, 3), expert),
        "expert_tensor": _lists(experts, part),
        "expert_tensor_model": _lists(experts, expert * part),
        "expert_data": _lists(experts.permute(0, 2, 3, 1), copies),
        "expert_model": _lists(experts.permute(1, 0, 2, 3), stages * expert * part),
        "amax_reduction": _lists(mesh, data * context * tensor),
        "embedding": _stages(pipelines, [0, *middle, last]),
        "position_embedding": _stages(pipelines, [0, *middle]),
        "encoder_relative_position_embedding": _stages(pipelines, [0] if split is None else list(range(split))),
        "decoder_relative_position_embedding": _stages(pipelines, [0] if split is None else list(range(split, stages))),
    }


def _lists(ranks: Tensor, length: int) -> list[list[int]]:
    return ranks.reshape(-1, length).tolist()


def _stages(pipelines: list[list[int]], stages: list[int]) -> list[list[int]]:
    """Return the ranks of the given stages of every pipeline, without stages that do not exist.

    A pipeline of one stage is returned whole.
    """
    if len(pipelines[0]) == 1:
        return pipelines
    existing = list(dict.fromkeys(stage for stage in stages if stage < len(pipelines[0])))
    return [[ranks[stage] for stage in existing] for ranks in pipelines if existing]
