"""Collectives over many tensors, flattened into one."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from .._failures import explained

# Extra memory that the broadcast of a module's state may use, in bytes.
_BROADCAST_BYTES = 1 << 28


def flatten(bucket: Sequence[Tensor]) -> Tensor:
    """Concatenate the elements of all tensors into one vector."""
    return _flatten_dense_tensors(bucket)


def unflatten(coalesced: Tensor, bucket: Sequence[Tensor]) -> list[Tensor]:
    """Split `coalesced` into views with the shapes of `bucket`."""
    pieces = _unflatten_dense_tensors(coalesced, bucket)
    # Up to PyTorch 2.9 pieces without elements have the shape (0,).
    return [piece if piece.numel() else piece.view_as(tensor) for piece, tensor in zip(pieces, bucket, strict=True)]


@torch.no_grad()
def apply_flat_dist_call(bucket: Sequence[Tensor], call: Callable[..., Any], extra_args: Any = None) -> None:
    """Run `call(vector, *extra_args)` once for all tensors, which have one dtype; `all_reduce` computes their mean."""
    coalesced = flatten(bucket)
    # `__module__` is None for methods of built-in types, and some callables have no name.
    known = str(getattr(call, "__module__", None)).startswith("torch.distributed") and hasattr(call, "__name__")
    with explained(f"{call.__name__} of {len(bucket)} tensors") if known else contextlib.nullcontext():
        call(coalesced, *(extra_args or ()))
    if call is dist.all_reduce:
        coalesced /= dist.get_world_size()
    for tensor, synced in zip(bucket, unflatten(coalesced, bucket), strict=True):
        tensor.copy_(synced)


def split_by_type(tensors: Iterable[Tensor]) -> OrderedDict[str, list[Tensor]]:
    """Group tensors by `tensor.type()`, in order of first appearance."""
    buckets: OrderedDict[str, list[Tensor]] = OrderedDict()
    for tensor in tensors:
        buckets.setdefault(tensor.type(), []).append(tensor)
    return buckets


def split_half_float_double(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group the float16, float32 and float64 tensors; empty groups are omitted."""
    return _split(tensors, torch.float16, torch.float32, torch.float64)


def split_half_float_double_bfloat16(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group the float16, float32, float64 and bfloat16 tensors; empty groups are omitted."""
    return _split(tensors, torch.float16, torch.float32, torch.float64, torch.bfloat16)


def _split(tensors: Iterable[Tensor], *dtypes: torch.dtype) -> list[list[Tensor]]:
    tensors = list(tensors)
    buckets = [[tensor for tensor in tensors if tensor.dtype == dtype] for dtype in dtypes]
    return [bucket for bucket in buckets if bucket]


def flat_dist_call(tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Any = None) -> None:
    """Run `apply_flat_dist_call` for the tensors of each type."""
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra_args)


def extract_tensors(maybe_tensor: Any, tensor_list: list[Tensor]) -> None:
    """Append all tensors of a tensor or of nested iterables to `tensor_list`; ignore other objects."""
    if isinstance(maybe_tensor, Tensor):
        tensor_list.append(maybe_tensor)
    elif not isinstance(maybe_tensor, str | bytes):
        try:
            items = iter(maybe_tensor)
        except TypeError:
            return
        for item in items:
            extract_tensors(item, tensor_list)


@torch.no_grad()
def broadcast_from_first(tensors: Iterable[Tensor], group: Any = None) -> None:
    """Copy the values of tensors of any types from the first process of the group (default: of all) to the others."""
    first = 0 if group is None else dist.get_global_rank(group, 0)
    for bucket in split_by_type(tensors).values():
        while bucket:
            chunk: list[Tensor] = []
            size = 0
            while bucket and (not chunk or size + bucket[0].nbytes <= _BROADCAST_BYTES):
                size += bucket[0].nbytes
                chunk.append(bucket.pop(0))
            # Send bytes, because no backend supports all dtypes.
            coalesced = torch.cat([tensor.detach().reshape(-1) for tensor in chunk])
            with explained("taking parameters and buffers from the first process"):
                dist.broadcast(coalesced.view(torch.uint8), first, group=group)
            for tensor, synced in zip(chunk, unflatten(coalesced, chunk), strict=True):
                tensor.copy_(synced)
