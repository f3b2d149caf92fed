"""Shards of distributed tensors (DTensor): local parts, and sums over all parts of a tensor.

A DTensor is known by its attribute `_local_tensor`, so that programs without sharded tensors import nothing of
`torch.distributed.tensor`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._failures import explained


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a distributed tensor; return any other tensor unchanged."""
    shard = getattr(tensor, "_local_tensor", None)
    return tensor if shard is None else shard


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is distributed, be it cut or replicated."""
    return local(tensor) is not tensor


def cut_dimensions(tensor: Tensor) -> tuple[tuple[Any, int], ...]:
    """Return the process groups over which a distributed tensor is cut, each with the tensor's dimension that it cuts.

    Returns () for a plain tensor, and for a tensor that every process holds as a whole.
    """
    if not is_sharded(tensor):
        return ()
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", ())
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} is distributed as {placements}, that is, as terms of a sum; "
            "redistribute it to Shard or Replicate"
        )
    if mesh is None:
        return ()
    cut = [(number, placement.dim) for number, placement in enumerate(placements) if not placement.is_replicate()]
    return tuple((mesh.get_group(number), dimension) for number, dimension in cut)


def shard_groups(tensor: Tensor) -> tuple[Any, ...]:
    """Return the process groups over which a distributed tensor is cut, one per dimension of its mesh; () if none.

    Sums over the local shard, added up over these groups, are sums over the whole tensor: replicas count once.
    """
    return tuple(group for group, _ in cut_dimensions(tensor))


def all_shard_groups(tensors: Iterable[Tensor]) -> list[Any]:
    """Return every process group over which one of the tensors is cut, once each, in the order of the tensors."""
    return list({id(group): group for tensor in tensors for group in shard_groups(tensor)}.values())


def place_of(tensor: Tensor) -> tuple[int, int, int, list[int]]:
    """Return the place of the local shard in a distributed tensor: start, run, stride and the first index by dimension.

    Element i of the contiguous shard is element start + (i // run) * stride + i % run of the contiguous tensor. This
    holds if at most one dimension besides the first is cut.
    """
    shape, shard = tuple(tensor.shape), local(tensor)
    first = [0] * len(shape)
    if is_sharded(tensor) and hasattr(tensor, "placements"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        found = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
        first = list(found[1])
    inner = max((dimension for _, dimension in cut_dimensions(tensor)), default=0)
    start = sum(index * math.prod(shape[dimension + 1 :]) for dimension, index in enumerate(first))
    return start, max(1, math.prod(shard.shape[inner:])), math.prod(shape[inner:]), first


def distributed_like(
    tensor: Tensor, shard: Tensor, shape: Sequence[int] | None = None, *, dimensions: int | None = None
) -> Tensor:
    """Return this process's shard as a tensor distributed like `tensor`; return the shard itself if that is plain.

    The whole tensor has the shape and strides of `tensor`, or is contiguous with another `shape`. It is cut as `tensor`
    is, but only in its first `dimensions`, if these are given, and replicated where others are cut.
    """
    if not is_sharded(tensor):
        return shard
    from torch.distributed.tensor import DTensor, Replicate

    size = tensor.shape if shape is None else torch.Size(shape)
    stride = tensor.stride() if shape is None else torch.empty(size, dtype=shard.dtype, device="meta").stride()
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    if dimensions is not None:
        cut = [not each.is_replicate() and each.dim < dimensions for each in placements]
        placements = [each if keep else Replicate() for each, keep in zip(placements, cut, strict=True)]
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=size, stride=stride)


def by_shard_groups(tensors: Sequence[Tensor]) -> list[tuple[tuple[Any, ...], list[int]]]:
    """Return the indices of tensors that are cut over the same process groups, with these groups."""
    members: dict[tuple[int, ...], tuple[tuple[Any, ...], list[int]]] = {}
    for index, tensor in enumerate(tensors):
        groups = shard_groups(tensor)
        members.setdefault(tuple(map(id, groups)), (groups, []))[1].append(index)
    return list(members.values())


def reduce_over(values: Tensor, groups: Iterable[Any], *, maximum: bool = False) -> Tensor:
    """Replace `values` by their sum, or maximum, over the processes of all groups; return them."""
    operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
    for group in groups:
        with explained("adding up measurements of shards"):
            dist.all_reduce(values, operation, group=group)
    return values


def like_parameter(param: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient that is distributed as its parameter is.

    Tensor parallelism leaves gradients of replicated parameters as terms of a sum (Partial).
    """
    wanted: Any = getattr(param, "placements", None)
    if wanted is None or getattr(gradient, "placements", wanted) == wanted:
        return gradient
    return gradient.redistribute(param.device_mesh, wanted)  # type: ignore[attr-defined, operator]
