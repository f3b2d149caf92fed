"""Which ranks work together: the groups of a model that is split over processes, as lists of ranks.

A mesh names the rank at every place (pipeline stage, data, context, tensor). Without a given mesh tensor-parallel ranks
are neighbours, then come the ranks that share a sequence, then the replicas, then the pipeline's stages. No process is
needed to compute any of this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MESH_DIMENSIONS = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class Sizes:
    """How many parts a model has in each direction; `data` follows from the number of processes."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1


def sizes_of(world: int, tensor: int, pipeline: int, context: int = 1, expert: int = 1) -> Sizes:
    """The sizes for `world` processes, or a RuntimeError that says which of them does not fit."""
    asked = {"tensor": tensor, "pipeline": pipeline, "context": context, "expert": expert}
    for name, size in asked.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} model parallel size must be a positive integer, got {size!r}")
    model = tensor * pipeline * context
    if world % model:
        raise RuntimeError(
            f"`world_size` ({world}) is not divisible by tensor_model_parallel_size ({tensor}) x "
            f"pipeline_model_parallel_size ({pipeline}) x context_parallel_size ({context})"
        )
    if (world // (tensor * pipeline)) % expert:
        raise RuntimeError(
            f"expert_model_parallel_size ({expert}) must divide the {world // (tensor * pipeline)} ranks that hold the "
            "same part of the model"
        )
    return Sizes(tensor, pipeline, world // model, context, expert)


def mesh_of(sizes: Sizes) -> Tensor:
    """The rank at every (pipeline stage, data, context, tensor), tensor-parallel ranks side by side."""
    shape = (sizes.pipeline, sizes.data, sizes.context, sizes.tensor)
    ranks = math.prod(shape)
    return torch.arange(ranks, dtype=torch.int64, device="cpu").view(shape)


def ranks_of(device_mesh: Any, world: int) -> Tensor:
    """The ranks of a DeviceMesh as [pp, dp, cp, tp], of size 1 where it lacks a dimension."""
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
    """An error unless a pipeline of so many stages can have `virtual` chunks each and a decoder from `split` on."""
    if virtual is not None:
        if virtual < 1:
            raise ValueError(f"virtual_pipeline_model_parallel_size_ must be positive, got {virtual}")
        if stages < 2:
            raise RuntimeError(f"interleaving needs at least 2 pipeline stages, got {stages}")
    if split is not None and not 0 <= split < max(stages, 2):
        raise ValueError(f"pipeline_model_parallel_split_rank_ must be a stage, 0 to {stages - 1}, got {split}")


def groups_of(mesh: Tensor, expert: int = 1, split: int | None = None) -> dict[str, list[list[int]]]:
    """Every kind of group, as disjoint lists of ranks; a rank may be in none of the lists of the embeddings' groups.

    `split` is the stage at which the decoder of an encoder-decoder model begins.
    """
    stages, data, context, tensor = mesh.shape
    pipelines = _lists(mesh.permute(1, 2, 3, 0), stages)
    last = stages - 1
    # Of all ranks that hold the same part of a dense layer, `expert` neighbours hold different experts.
    same_part = mesh.permute(0, 3, 1, 2).reshape(stages, tensor, data * context // expert, expert)
    middle = [] if split is None else [split]
    return {
        "tensor": _lists(mesh, tensor),
        "pipeline": pipelines,
        "data": _lists(mesh.permute(0, 2, 3, 1), data),
        "model": _lists(mesh.permute(1, 2, 0, 3), stages * tensor),
        "context": _lists(mesh.permute(0, 1, 3, 2), context),
        "data_with_context": _lists(mesh.permute(0, 3, 1, 2), data * context),
        "expert": _lists(same_part, expert),
        "expert_data": _lists(same_part.transpose(2, 3), data * context // expert),
        "expert_model": _lists(same_part.permute(2, 0, 3, 1), stages * expert * tensor),
        "amax_reduction": _lists(mesh, data * context * tensor),
        "embedding": _stages(pipelines, [0, *middle, last]),
        "position_embedding": _stages(pipelines, [0, *middle]),
        "encoder_relative_position_embedding": _stages(pipelines, [0] if split is None else list(range(split))),
        "decoder_relative_position_embedding": _stages(pipelines, [0] if split is None else list(range(split, stages))),
    }


def _lists(ranks: Tensor, length: int) -> list[list[int]]:
    return ranks.reshape(-1, length).tolist()


def _stages(pipelines: list[list[int]], stages: list[int]) -> list[list[int]]:
    """The ranks of these stages of every pipeline, without stages that do not exist; a pipeline of one stage whole."""
    if len(pipelines[0]) == 1:
        return pipelines
    wanted = list(dict.fromkeys(stage for stage in stages if stage < len(pipelines[0])))
    return [[ranks[stage] for stage in wanted] for ranks in pipelines if wanted]
