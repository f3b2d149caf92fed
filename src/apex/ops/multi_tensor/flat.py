"""Tensors that lie one after the other in one flat buffer: where each starts, and views of it.

Every tensor starts at a multiple of 16 bytes, so that kernels read it as wide as they can; what is between two tensors
is zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .torch_lists import is_dense

ALIGNMENT = 16  # bytes


def aligned_size(tensor: Tensor) -> int:
    """The elements that a tensor takes up in a flat buffer: its own, up to a multiple of 16 bytes."""
    unit = max(1, ALIGNMENT // tensor.element_size())
    return -(-tensor.numel() // unit) * unit


def offsets_of(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each tensor starts in a flat buffer, in elements, and the buffer's size."""
    offsets, total = [], 0
    for tensor in tensors:
        offsets.append(total)
        total += aligned_size(tensor)
    return offsets, total


def view_like(buffer: Tensor, offset: int, like: Tensor) -> Tensor:
    """The elements of `buffer` from `offset` on, shaped like `like`, and strided like it where it has no gaps."""
    strides = like.stride() if is_dense(like) else torch.empty_like(like, device="meta").stride()
    # `.data`: with a version counter of its own, as if the views had nothing to do with each other.
    return buffer.as_strided(like.shape, strides, buffer.storage_offset() + offset).data


@torch.no_grad()
def combine(tensors: Sequence[Tensor], copy_values: bool = True) -> tuple[Tensor, list[Tensor]]:
    """Moves tensors of one dtype and device to a new flat buffer; returns it and the views that they became.

    They keep their values, or become zero without `copy_values`.
    """
    offsets, total = offsets_of(tensors)
    buffer = torch.zeros(total, dtype=tensors[0].dtype, device=tensors[0].device)
    views = [view_like(buffer, offset, tensor) for offset, tensor in zip(offsets, tensors, strict=True)]
    if copy_values:
        torch._foreach_copy_(views, [tensor.detach() for tensor in tensors])
    for tensor, view in zip(tensors, views, strict=True):
        tensor.data = view
    return buffer, views


def extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the first one after its last."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + span * tensor.element_size()


def overlapping(tensors: Sequence[Tensor]) -> set[int]:
    """Indices of tensors that share memory with another of the list."""
    found: set[int] = set()
    extents = sorted((*extent(tensor), index) for index, tensor in enumerate(tensors) if tensor.numel())
    last_end, last = -1, -1
    for start, end, index in extents:
        if start < last_end:
            found.update((last, index))
        if end > last_end:
            last_end, last = end, index
    return found
