"""The process groups of a model that is split over processes, and this process's rank in them.

`initialize_model_parallel` creates the groups once, on any backend; the other functions query them. Ranks are ordered
with tensor-parallel neighbours first, then ranks that share a sequence (context), replicas (data) and pipeline stages.
`_groups/layout.py` computes the lists of ranks.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist

from .._arguments import Count, Index, checked
from .._distributed.groups import make_group
from ._groups.expert_groups import get_expert_data_parallel_group as get_expert_data_parallel_group
from ._groups.expert_groups import get_expert_data_parallel_rank as get_expert_data_parallel_rank
from ._groups.expert_groups import get_expert_data_parallel_world_size as get_expert_data_parallel_world_size
from ._groups.expert_groups import get_expert_model_parallel_group as get_expert_model_parallel_group
from ._groups.expert_groups import get_expert_model_parallel_rank as get_expert_model_parallel_rank
from ._groups.expert_groups import get_expert_model_parallel_world_size as get_expert_model_parallel_world_size
from ._groups.expert_groups import (
    get_expert_tensor_and_model_parallel_group as get_expert_tensor_and_model_parallel_group,
)
from ._groups.expert_groups import (
    get_expert_tensor_and_model_parallel_rank as get_expert_tensor_and_model_parallel_rank,
)
from ._groups.expert_groups import (
    get_expert_tensor_and_model_parallel_world_size as get_expert_tensor_and_model_parallel_world_size,
)
from ._groups.expert_groups import (
    get_expert_tensor_model_pipeline_parallel_group as get_expert_tensor_model_pipeline_parallel_group,
)
from ._groups.expert_groups import get_expert_tensor_parallel_group as get_expert_tensor_parallel_group
from ._groups.expert_groups import get_expert_tensor_parallel_rank as get_expert_tensor_parallel_rank
from ._groups.expert_groups import get_expert_tensor_parallel_world_size as get_expert_tensor_parallel_world_size
from ._groups.expert_groups import get_tensor_and_context_parallel_group as get_tensor_and_context_parallel_group
from ._groups.expert_groups import get_tensor_and_data_parallel_group as get_tensor_and_data_parallel_group
from ._groups.layout import (
    check_stages,
    default_mesh,
    mesh_from_device_mesh,
    parallel_sizes,
    rank_groups,
)
from ._groups.nccl_network import init_nccl_net as init_nccl_net
from ._groups.nccl_network import new_nccl_ib_group as new_nccl_ib_group
from ._groups.nccl_network import new_nccl_socket_group as new_nccl_socket_group
from ._groups.nccl_network import new_process_group as new_process_group
from ._groups.nccl_network import set_nccl_ib_envs as set_nccl_ib_envs
from ._groups.nccl_network import set_nccl_socket_envs as set_nccl_socket_envs
from ._groups.process_groups import check_backend, device_mesh_of, make_groups
from ._groups.state import STATE as _state
from ._groups.state import State


class ExperimentalWarning(Warning):
    """A warning that an experimental feature of PyTorch is used."""


@checked
def initialize_model_parallel(
    tensor_model_parallel_size_: Count = 1,
    pipeline_model_parallel_size_: Count = 1,
    virtual_pipeline_model_parallel_size_: Count | None = None,
    pipeline_model_parallel_split_rank_: Index | None = None,
    use_fp8_: bool = False,
    init_mpi_proc_group: bool = False,
    *,
    default_backend: str | None = None,
    p2p_backend: str | None = None,
    context_parallel_size: Count = 1,
    expert_model_parallel_size: Count = 1,
    expert_tensor_parallel_size: Count | None = None,
    device_mesh: Any = None,
) -> None:
    """Make all process groups of a model that is split over the processes of the default group.

    A size larger than the number of processes is reduced to that number, with a warning. `default_backend` and
    `p2p_backend` (pipelines) default to the default group's backend. Every `context_parallel_size` ranks share a
    sequence. `expert_model_parallel_size` splits the experts of a layer over ranks, and `expert_tensor_parallel_size`,
    by default the tensor-parallel size, each expert. Their product may be any divisor of a pipeline stage's ranks.
    `use_fp8_` also makes a group for the reduction of fp8 magnitudes.

    `device_mesh` replaces the sizes: a `DeviceMesh` over all processes with dimensions named "tp", "pp", "dp" or "cp",
    in any order. Its own groups are used.
    """
    if not dist.is_initialized():
        raise AssertionError("torch.distributed is not initialized: call torch.distributed.init_process_group first")
    if model_parallel_is_initialized():
        raise AssertionError("model parallel groups exist already: call destroy_model_parallel first")
    world, experts = dist.get_world_size(), (expert_model_parallel_size, expert_tensor_parallel_size)
    if device_mesh is None:
        tensor = _at_most(world, tensor_model_parallel_size_=tensor_model_parallel_size_)
        pipeline = _at_most(world, pipeline_model_parallel_size_=pipeline_model_parallel_size_)
        sizes = parallel_sizes(world, tensor, pipeline, context_parallel_size, *experts)
        mesh = default_mesh(sizes)
    else:
        mesh = mesh_from_device_mesh(device_mesh, world)
        stages, _, context, tensor = mesh.shape
        sizes = parallel_sizes(world, tensor, stages, context, *experts)
    check_stages(sizes.pipeline, virtual_pipeline_model_parallel_size_, pipeline_model_parallel_split_rank_)
    for name, backend in ("default_backend", default_backend), ("p2p_backend", p2p_backend):
        check_backend(name, backend)
        _check_ucc(backend)
    if init_mpi_proc_group and not dist.is_mpi_available():
        raise RuntimeError("init_mpi_proc_group=True needs a PyTorch that was built with MPI")

    state = State(sizes=sizes, mesh=mesh, split_rank=pipeline_model_parallel_split_rank_)
    if virtual_pipeline_model_parallel_size_ is not None:
        state.virtual_rank, state.virtual_size = 0, virtual_pipeline_model_parallel_size_
    kinds = rank_groups(mesh, sizes.expert, pipeline_model_parallel_split_rank_, sizes.expert_tensor)
    if not use_fp8_:
        del kinds["amax_reduction"]
    state.groups = make_groups(kinds, default_backend, p2p_backend, device_mesh)
    if init_mpi_proc_group:
        state.mpi_group = make_group(backend="mpi")
        state.groups.made.append(state.mpi_group)
    if dist.get_backend() == "gloo":
        # A process that destroyed its groups at once would close connections while others still open theirs.
        dist.barrier()
    _state.become(state)


def _at_most(world: int, **size: int) -> int:
    """Return the size, or the number of processes if that is smaller, with a warning that names both."""
    ((name, value),) = size.items()
    if not isinstance(value, int) or value <= world:
        return value
    ranks = f"{world} process" if world == 1 else f"{world} processes"
    warnings.warn(f"{name}={value} is more than the {ranks} that there are: {world} is used instead", stacklevel=4)
    return world


def _check_ucc(backend: str | None) -> None:
    if backend == "ucc":
        check_torch_ucc_availability()
        warnings.warn("`ucc` backend support is experimental", ExperimentalWarning, stacklevel=4)


def check_torch_ucc_availability() -> None:
    """Raise an ImportError if PyTorch has no UCC."""
    if not dist.is_ucc_available():
        raise ImportError("UCC backend requires pytorch source build with UCC installed and enabled")


def destroy_model_parallel() -> None:
    """Destroy the groups and return to the uninitialized state."""
    made = _state.groups.made
    _state.become(State())
    if dist.is_initialized():
        for group in made:
            dist.destroy_process_group(group)


def is_unitialized() -> bool:
    """Return True if the groups do not exist."""
    return not _state.initialized


def model_parallel_is_initialized() -> bool:
    """Return True if the groups exist."""
    return _state.initialized


def get_device_mesh() -> Any:
    """Return a DeviceMesh with the dimensions "pp", "dp", "tp", and "cp" before "tp" if sequences are split."""
    assert _state.mesh is not None, "model parallel groups do not exist: call initialize_model_parallel first"
    if _state.device_mesh is None:
        _state.device_mesh = device_mesh_of(_state.mesh, _state.groups)
    return _state.device_mesh


def get_rank_info() -> tuple[int, int, int, int | None]:
    """Return this process's (data, tensor, pipeline, virtual pipeline) ranks, or zeros if the groups do not exist."""
    if is_unitialized():
        return (0, 0, 0, 0)
    return (
        get_data_parallel_rank(),
        get_tensor_model_parallel_rank(),
        get_pipeline_model_parallel_rank(),
        get_virtual_pipeline_model_parallel_rank(),
    )


def get_model_parallel_group() -> Any:
    """Return the group of ranks that together hold one copy of the model."""
    return _state.group("model", "model parallel group")


def get_tensor_model_parallel_group() -> Any:
    """Return the group of ranks that hold the parts of the same layers."""
    return _state.group("tensor", "tensor model parallel group")


def get_pipeline_model_parallel_group() -> Any:
    """Return the group of ranks that hold the stages of one pipeline."""
    return _state.group("pipeline", "pipeline model parallel group")


@checked
def get_data_parallel_group(with_context_parallel: bool = False) -> Any:
    """Return the group of ranks with the same parameters and different samples.

    With `with_context_parallel` it also includes the ranks that process other parts of the same sequences.
    """
    return _state.group("data_with_context" if with_context_parallel else "data", "data parallel group")


def get_context_parallel_group() -> Any:
    """Return the group of ranks that share a sequence."""
    return _state.group("context", "context parallel group")


def get_embedding_group() -> Any:
    """Return the group of stages with the word embeddings: first, last, and the decoder's first."""
    return _state.group("embedding", "embedding group")


def get_position_embedding_group() -> Any:
    """Return the group of stages with position embeddings: the first, and the decoder's first."""
    return _state.group("position_embedding", "position embedding group")


def get_encoder_relative_position_embedding_group() -> Any:
    """Return the group of the encoder's stages."""
    return _state.group("encoder_relative_position_embedding", "encoder relative position embedding group")


def get_decoder_relative_position_embedding_group() -> Any:
    """Return the group of the decoder's stages."""
    return _state.group("decoder_relative_position_embedding", "decoder relative position embedding group")


def get_amax_reduction_group() -> Any:
    """Return the group that agrees on the largest magnitudes of fp8 tensors: all ranks of one pipeline stage."""
    return _state.group("amax_reduction", "FP8 amax reduction group")


def get_tensor_model_parallel_world_size() -> int:
    """Return the number of ranks that hold the parts of the same layers."""
    return _state.size("tensor", "tensor model parallel group")


def get_tensor_model_parallel_rank() -> int:
    """Return this process's tensor-parallel rank: the index of its part of each layer."""
    return _state.rank("tensor", "tensor model parallel group")


def get_pipeline_model_parallel_world_size() -> int:
    """Return the number of pipeline ranks."""
    return _state.size("pipeline", "pipeline model parallel group")


def get_pipeline_model_parallel_rank() -> int:
    """Return this process's pipeline rank."""
    return _state.rank("pipeline", "pipeline model parallel group")


@checked
def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    """Return the number of ranks that hold the same parameters."""
    return dist.get_world_size(get_data_parallel_group(with_context_parallel))


@checked
def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    """Return this process's rank among the processes with the same parameters."""
    return dist.get_rank(get_data_parallel_group(with_context_parallel))


def get_context_parallel_world_size() -> int:
    """Return the number of ranks that share a sequence."""
    return dist.get_world_size(get_context_parallel_group())


def get_context_parallel_rank() -> int:
    """Return the index of this process's part of a sequence."""
    return dist.get_rank(get_context_parallel_group())


@checked
def set_tensor_model_parallel_world_size(world_size: Count | None) -> None:
    """Override the result of `get_tensor_model_parallel_world_size`; None removes the override."""
    _state.size_overrides["tensor"] = world_size


@checked
def set_pipeline_model_parallel_world_size(world_size: Count | None) -> None:
    """Override the result of `get_pipeline_model_parallel_world_size`; None removes the override."""
    _state.size_overrides["pipeline"] = world_size


@checked
def set_tensor_model_parallel_rank(rank: Index | None) -> None:
    """Override the result of `get_tensor_model_parallel_rank`; None removes the override."""
    _state.rank_overrides["tensor"] = rank


@checked
def set_pipeline_model_parallel_rank(rank: Index | None) -> None:
    """Override the result of `get_pipeline_model_parallel_rank`; None removes the override."""
    _state.rank_overrides["pipeline"] = rank


def get_tensor_model_parallel_src_rank() -> int:
    """Return the global rank of the first rank in this process's tensor-parallel group."""
    return _state.member("tensor", 0)


def get_data_parallel_src_rank() -> int:
    """Return the global rank of the first rank in this process's data-parallel group."""
    return _state.member("data", 0)


def get_pipeline_model_parallel_first_rank() -> int:
    """Return the global rank of the first stage."""
    return _state.member("pipeline", 0)


def get_pipeline_model_parallel_last_rank() -> int:
    """Return the global rank of the last stage."""
    return _state.member("pipeline", -1)


def get_pipeline_model_parallel_next_rank() -> int:
    """Return the global rank of the next stage; after the last stage comes the first."""
    return _state.member("pipeline", get_pipeline_model_parallel_rank() + 1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """Return the global rank of the previous stage; before the first stage comes the last."""
    return _state.member("pipeline", get_pipeline_model_parallel_rank() - 1)


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Return the index of the chunk that is being built or run, or None without interleaving."""
    return _state.virtual_rank


@checked
def set_virtual_pipeline_model_parallel_rank(rank: Index | None) -> None:
    """Set the index of the chunk that is being built or run."""
    _state.virtual_rank = rank


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Return the number of chunks per rank, or None without interleaving."""
    return _state.virtual_size


@checked
def set_virtual_pipeline_model_parallel_world_size(size: Count | None) -> None:
    """Set the number of chunks per rank."""
    _state.virtual_size = size


def get_pipeline_model_parallel_split_rank() -> int | None:
    """Return the decoder's first stage, or None if the model is not an encoder-decoder."""
    return _state.split_rank


@checked
def set_pipeline_model_parallel_split_rank(pipeline_model_parallel_split_rank: Index | None) -> None:
    """Set the decoder's first stage."""
    _state.split_rank = pipeline_model_parallel_split_rank


@checked
def is_pipeline_first_stage(ignore_virtual: bool = False) -> bool:
    """Return True on the first pipeline rank, for its first chunk only unless `ignore_virtual`."""
    if not ignore_virtual and _state.virtual_size is not None and _state.virtual_rank != 0:
        return False
    return get_pipeline_model_parallel_rank() == 0


@checked
def is_pipeline_last_stage(ignore_virtual: bool = False) -> bool:
    """Return True on the last pipeline rank, for its last chunk only unless `ignore_virtual`."""
    if not ignore_virtual and _state.virtual_size is not None and _state.virtual_rank != _state.virtual_size - 1:
        return False
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


@checked
def is_pipeline_stage_before_split(rank: int | None = None) -> bool:
    """Return True if stage `rank` (default: this one) belongs to the encoder, or if the model is not split."""
    if get_pipeline_model_parallel_world_size() == 1 or _state.split_rank is None:
        return True
    return (get_pipeline_model_parallel_rank() if rank is None else rank) < _state.split_rank


@checked
def is_pipeline_stage_after_split(rank: int | None = None) -> bool:
    """Return True if stage `rank` (default: this one) belongs to the decoder, or if the model is not split."""
    if get_pipeline_model_parallel_world_size() == 1 or _state.split_rank is None:
        return True
    return (get_pipeline_model_parallel_rank() if rank is None else rank) >= _state.split_rank


def is_pipeline_stage_at_split() -> bool:
    """Return True if this is the encoder's last stage and the next stage is the decoder's first."""
    rank = get_pipeline_model_parallel_rank()
    return is_pipeline_stage_before_split(rank) and is_pipeline_stage_after_split(rank + 1)


@checked
def is_rank_in_embedding_group(ignore_virtual: bool = False) -> bool:
    """Return True if this rank holds word embeddings, in the current chunk unless `ignore_virtual`."""
    ranks = _state.groups.ranks.get("embedding", [])
    rank = dist.get_rank() if ranks else None
    if rank not in ranks:
        return False
    if ignore_virtual:
        return True
    if rank == ranks[0]:
        return is_pipeline_first_stage()
    return is_pipeline_last_stage() if rank == ranks[-1] else True


def is_rank_in_position_embedding_group() -> bool:
    """Return True if this rank holds position embeddings."""
    return "position_embedding" in _state.groups.ranks


def is_rank_in_encoder_relative_position_embedding_group() -> bool:
    """Return True if this rank is a stage of the encoder."""
    return "encoder_relative_position_embedding" in _state.groups.ranks


def is_rank_in_decoder_relative_position_embedding_group() -> bool:
    """Return True if this rank is a stage of the decoder."""
    return "decoder_relative_position_embedding" in _state.groups.ranks
