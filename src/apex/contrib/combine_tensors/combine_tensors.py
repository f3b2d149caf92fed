"""A flat buffer for a list of tensors, which become views of it: one operation on the buffer changes them all.

    combined = combine_npu([weight, bias])
    combined.mul_(0.5)                                    # halves weight and bias
    is_combined_tensor_valid(combined, [weight, bias])    # False once one of them got other memory

Works on every device. A tensor shares the buffer until it gets other memory (`tensor.data = ...`, `module.to(...)`);
then combine again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...ops.multi_tensor import flat


def combine_npu(list_of_tensor: Sequence[Tensor], require_copy_value: bool = True) -> Tensor | None:
    """Move the tensors to one flat buffer and return it, or None if there are no tensors.

    The tensors must have one dtype and device. They keep their shapes and strides, and also their values unless
    `require_copy_value` is False, which sets them to zero. Each starts at a multiple of 16 bytes; the gaps are zero.
    """
    tensors = list(list_of_tensor)
    if not tensors:
        return None
    _check(tensors)
    buffer = flat.FlatBuffer(tensors)
    buffer.adopt(tensors, require_copy_value)
    return buffer.values


def _check(tensors: list[Tensor]) -> None:
    """Raise an error if the tensors cannot be combined."""
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"list_of_tensor[{index}] is {type(tensor).__name__}; tensors are combined")
        if tensor.layout != torch.strided:
            raise TypeError(f"list_of_tensor[{index}] is sparse ({tensor.layout}); only dense tensors are combined")
        if tensor.dtype != first.dtype:
            raise TypeError(
                f"list_of_tensor[{index}] is {tensor.dtype}, list_of_tensor[0] is {first.dtype}; "
                "one buffer holds one dtype"
            )
        if tensor.device != first.device:
            raise ValueError(
                f"list_of_tensor[{index}] is on {tensor.device}, list_of_tensor[0] on {first.device}; "
                "one buffer is on one device"
            )
    shared = sorted(flat.overlapping(tensors))
    if shared:
        raise ValueError(
            f"the tensors {shared} of list_of_tensor share memory with each other already; each can be combined once"
        )


def get_aligned_storage_size(tensor: Tensor) -> int:
    """Return the number of elements that `tensor` takes up in a combined buffer, including the gap after it."""
    return flat.aligned_size(tensor)


def get_part_combined_tensor(combined_tensor: Tensor | None, index: int, size: int) -> Tensor | None:
    """Return a view of `size` elements of a combined buffer from `index` on, or None if there are none."""
    if combined_tensor is None or size == 0:
        return None
    if index < 0 or size < 0 or index + size > combined_tensor.numel():
        raise ValueError(
            f"index={index} and size={size} reach out of a combined tensor of {combined_tensor.numel()} elements"
        )
    return combined_tensor[index : index + size]


def is_combined_tensor_valid(combined_tensor: Tensor | None, list_of_tensor: Sequence[Tensor | None]) -> bool:
    """Return whether every tensor still lies in the combined buffer."""
    return next(_broken(combined_tensor, list_of_tensor), None) is None


def check_combined_tensor(combined_tensor: Tensor | None, list_of_tensor: Sequence[Tensor | None]) -> None:
    """Raise RuntimeError if a tensor lies outside the combined buffer; the message names each such tensor and why."""
    problems = list(_broken(combined_tensor, list_of_tensor))
    if problems:
        raise RuntimeError("memory is no longer shared with the combined tensor: " + "; ".join(problems))


def _broken(combined: Tensor | None, tensors: Sequence[Tensor | None]) -> Iterator[str]:
    for index, tensor in enumerate(tensors):
        name = f"list_of_tensor[{index}]"
        if combined is None:
            yield f"there is no combined tensor for {name}"
        elif tensor is None:
            yield f"{name} is None"
        elif tensor.device != combined.device:
            yield f"{name} is on {tensor.device}, the combined tensor on {combined.device}"
        elif tensor.dtype != combined.dtype:
            yield f"{name} is {tensor.dtype}, the combined tensor {combined.dtype}"
        elif tensor.numel():
            start, end = flat.extent(tensor)
            first, last = flat.extent(combined)
            if start < first or end > last:
                yield f"{name} (shape {tuple(tensor.shape)}) has other memory"
