"""Tensors that lie one after the other in one flat buffer: their offsets, and views of the buffer.

Every tensor starts at a multiple of 16 bytes, so that kernels can use the widest loads. Gaps between tensors are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes


def flat(tensor: Tensor) -> Tensor:
    """Return a dense tensor's elements in memory order, as a view."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one stretch of memory without gaps or overlaps."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def laid_out_alike(tensors: Sequence[Tensor]) -> bool:
    """Return whether elements at the same offset in memory have the same index in all tensors."""
    if all(map(Tensor.is_contiguous, tensors)):
        return True
    first = tensors[0]
    return is_dense(first) and all(
        tensor.shape == first.shape and tensor.stride() == first.stride() for tensor in tensors
    )


def with_strides_of(like: Tensor, tensor: Tensor) -> Tensor:
    """Return `tensor`, or a copy of it with the strides of `like` if its own are different."""
    # Two contiguous tensors may have different strides in a dimension of size 1.
    if tensor.stride() == like.stride() or (tensor.is_contiguous() and like.is_contiguous()):
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def aligned_size(tensor: Tensor) -> int:
    """Return the elements that a tensor takes up in a flat buffer: its own, rounded up to a multiple of 16 bytes."""
    unit = max(1, ALIGNMENT // tensor.element_size())
    return -(-tensor.numel() // unit) * unit


def offsets_of(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return the offset of each tensor in a flat buffer, in elements, and the buffer's size."""
    offsets, total = [], 0
    for tensor in tensors:
        offsets.append(total)
        total += aligned_size(tensor)
    return offsets, total


def view_like(buffer: Tensor, offset: int, like: Tensor) -> Tensor:
    """Return the elements of `buffer` from `offset` on, shaped like `like`, and with its strides if it has no gaps."""
    strides = like.stride() if is_dense(like) else torch.empty_like(like, device="meta").stride()
    # `.data` gives each view its own version counter, so that a write to one does not invalidate the others.
    return buffer.as_strided(like.shape, strides, buffer.storage_offset() + offset).data


class FlatBuffer:
    """A flat buffer of zeros, `values`, and `views` of it that are shaped and strided like given tensors of one device.

    The tensors start at `offsets` in a buffer of `size` elements; without offsets, `offsets_of` decides.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        offsets: Sequence[int] | None = None,
        size: int = 0,
        dtype: torch.dtype | None = None,
        allocate: Callable[..., Tensor] = torch.zeros,
    ) -> None:
        if offsets is None:
            offsets, size = offsets_of(tensors)
        self.values = allocate(size, dtype=dtype or tensors[0].dtype, device=tensors[0].device)
        self.views = [view_like(self.values, offset, tensor) for offset, tensor in zip(offsets, tensors, strict=True)]

    def holds(self, index: int, tensor: Tensor | None) -> bool:
        """Return whether a tensor is the view at `index`, or has the same memory, strides and dtype."""
        view = self.views[index]
        return (
            tensor is not None
            and tensor.layout == torch.strided
            and tensor.data_ptr() == view.data_ptr()
            and tensor.stride() == view.stride()
            and tensor.dtype == view.dtype
        )

    @torch.no_grad()
    def adopt(self, tensors: Sequence[Tensor], copy_values: bool = True) -> None:
        """Move the tensors to the buffer: they keep their values, or become zero without `copy_values`."""
        if copy_values:
            torch._foreach_copy_(self.views, [tensor.detach() for tensor in tensors])
        for tensor, view in zip(tensors, self.views, strict=True):
            tensor.data = view


def extent(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the first one after its last."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + span * tensor.element_size()


def overlapping(tensors: Sequence[Tensor]) -> set[int]:
    """Return the indices of tensors that share memory with another of the list; meta tensors share none."""
    indices: set[int] = set()
    present = ((index, tensor) for index, tensor in enumerate(tensors) if tensor.numel() and not tensor.is_meta)
    extents = sorted((*extent(tensor), index) for index, tensor in present)
    last_end, last = -1, -1
    for start, end, index in extents:
        if 0 < start < last_end:  # tensors without memory, on the device "meta", all have the address 0
            indices.update((last, index))
        if end > last_end:
            last_end, last = end, index
    return indices
