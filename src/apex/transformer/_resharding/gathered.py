"""Conversion between whole tensors in host memory and the parts of them that a process holds.

Parameters may be sharded (DTensors of FSDP2), split over tensor-parallel ranks (`tensor_model_parallel`,
`partition_dim`, `partition_stride`), or on another pipeline stage.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._distributed.collectives import gather_objects
from ...ops._host import HOST
from .. import parallel_state


def _tensor_group(param: Any) -> Any:
    """Return the processes over which a parameter is split, or None if it is not split."""
    if parallel_state.is_unitialized() or parallel_state.get_tensor_model_parallel_world_size() == 1:
        return None
    return parallel_state.get_tensor_model_parallel_group() if getattr(param, "tensor_model_parallel", False) else None


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
    return hasattr(value, "full_tensor") or (_tensor_group(param) is not None and value.dim() > 0)


def full_tensor(value: Tensor, param: Any, copies: bool) -> Tensor:
    """Return the whole tensor in host memory, gathered from all ranks' parts; all processes call it.

    `value` is this process's part, laid out like `param`. With `copies` the result never shares memory with `value`.
    """
    value = value.detach()
    if hasattr(value, "full_tensor"):
        value = value.to(value.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    group = _tensor_group(param)
    if group is not None and value.dim():
        value = value.to(param.device)
        gathered = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, value.contiguous(), group=group)
        # A part of stride s has s blocks. In the whole, the first blocks of all ranks come before the second blocks.
        blocks = [part.chunk(param.partition_stride, param.partition_dim) for part in gathered]
        value = torch.cat([block for turn in zip(*blocks, strict=True) for block in turn], param.partition_dim)
    moved = value.to(HOST)
    return moved.clone() if copies and moved is value else moved


def full_shape(like: Any, param: Any) -> torch.Size:
    """Return the shape of the whole tensor; `like`, laid out like `param`, is this process's part of it."""
    shape = list(like.shape)
    group = _tensor_group(param)
    if group is not None and shape:
        shape[param.partition_dim] *= dist.get_world_size(group)
    return torch.Size(shape)


def local_part(value: Tensor, like: Any, param: Any) -> Tensor:
    """Return this process's part of a whole tensor, laid out like `like`."""
    group = _tensor_group(param)
    if group is not None and value.dim():
        size = dist.get_world_size(group)
        blocks = value.chunk(size * param.partition_stride, param.partition_dim)
        value = torch.cat(blocks[dist.get_rank(group) :: size], param.partition_dim)
    if not hasattr(like, "placements"):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh = like.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, like.placements).to(like.device)
