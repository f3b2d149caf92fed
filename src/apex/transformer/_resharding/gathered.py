"""Conversion between whole tensors in host memory and the parts of them that a process holds.

Parameters may be sharded (DTensors of FSDP2), split over tensor-parallel ranks (`tensor_model_parallel`,
`partition_dim`, `partition_stride`), split over ranks of experts (`allreduce = False`, dimension 0), or on another
pipeline stage.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._distributed.collectives import gather_objects
from ..._distributed.experts import is_expert
from ...ops._host import HOST
from .. import parallel_state


def _splits(param: Any) -> list[tuple[Any, int, int]]:
    """Return the process group, dimension and stride of each split of a parameter; an expert may have two."""
    if parallel_state.is_unitialized():
        return []
    splits, expert = [], is_expert(param)
    if getattr(param, "tensor_model_parallel", False):
        groups = (parallel_state.get_tensor_model_parallel_group, parallel_state.get_expert_tensor_parallel_group)
        splits.append((groups[expert](), param.partition_dim, param.partition_stride))
    if expert:
        splits.append((parallel_state.get_expert_model_parallel_group(), 0, 1))
    return [split for split in splits if dist.get_world_size(split[0]) > 1]


def pipeline_group() -> Any:
    """Return the processes that hold the stages of a model, or None if there is only one stage."""
    if parallel_state.is_unitialized() or parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return None
    return parallel_state.get_pipeline_model_parallel_group()


def gather_from_stages(value: Any) -> list[Any]:
    """Return the values that all pipeline stages passed, ordered by stage."""
    group = pipeline_group()
    if group is None:
        return [value]
    return gather_objects(value, "telling other pipeline stages what this one holds", group)


def is_divided(value: Tensor, param: Any) -> bool:
    """Return whether a tensor, laid out like `param`, is only this process's part of a whole tensor."""
    return hasattr(value, "full_tensor") or (value.dim() > 0 and bool(_splits(param)))


def full_tensor(value: Tensor, param: Any, copies: bool) -> Tensor:
    """Return the whole tensor in host memory, gathered from all ranks' parts; all processes call it.

    `value` is this process's part, laid out like `param`. With `copies` the result never shares memory with `value`.
    """
    value = value.detach()
    if hasattr(value, "full_tensor"):
        value = value.to(value.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    for group, dim, stride in _splits(param) if value.dim() else ():
        value = value.to(param.device).contiguous()
        gathered = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, value, group=group)
        # A part of stride s has s blocks. In the whole, the first blocks of all ranks come before the second blocks.
        blocks = [part.chunk(stride, dim) for part in gathered]
        value = torch.cat([block for turn in zip(*blocks, strict=True) for block in turn], dim)
    moved = value.to(HOST)
    return moved.clone() if copies and moved is value else moved


def full_shape(like: Any, param: Any) -> torch.Size:
    """Return the shape of the whole tensor; `like`, laid out like `param`, is this process's part of it."""
    shape = list(like.shape)
    for group, dim, _ in _splits(param) if shape else ():
        shape[dim] *= dist.get_world_size(group)
    return torch.Size(shape)


def local_part(value: Tensor, like: Any, param: Any) -> Tensor:
    """Return this process's part of a whole tensor, laid out like `like`."""
    for group, dim, stride in _splits(param) if value.dim() else ():
        size = dist.get_world_size(group)
        value = torch.cat(value.chunk(size * stride, dim)[dist.get_rank(group) :: size], dim)
    if not hasattr(like, "placements"):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh = like.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, like.placements).to(like.device)
