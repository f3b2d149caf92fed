"""One flat buffer for a list of tensors, which become views of it: one operator on the buffer changes them all.

    combined = combine_npu([weight, bias])
    combined.mul_(0.5)                                    # halves weight and bias
    is_combined_tensor_valid(combined, [weight, bias])    # False once one of them got other memory

Works on every device. Sharing lasts until a tensor is given other memory (`tensor.data = ...`, `module.to(...)`); then
combine again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...ops.multi_tensor import flat


def combine_npu(list_of_tensor: Sequence[Tensor], require_copy_value: bool = True) -> Tensor | None:
    """Moves the tensors, which must have one dtype and device, to one flat buffer and returns it; None for no tensors.

    They keep shapes, strides and values, or become zero without `require_copy_value`. Each starts at a multiple of 16
    bytes; the gaps are zero.
    """
    tensors = list(list_of_tensor)
    if not tensors:
        return None
    _check(tensors)
    return flat.combine(tensors, require_copy_value)[0]


def _check(tensors: list[Tensor]) -> None:
    """Raises for tensors that cannot be combined."""
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
    """The elements that `tensor` takes up in a combined buffer, the gap after it included."""
    return flat.aligned_size(tensor)


def get_part_combined_tensor(combined_tensor: Tensor | None, index: int, size: int) -> Tensor | None:
    """The `size` elements of a combined buffer from `index` on, as a view; None of nothing."""
    if combined_tensor is None or size == 0:
        return None
    if index < 0 or size < 0 or index + size > combined_tensor.numel():
        raise ValueError(
            f"index={index} and size={size} reach out of a combined tensor of {combined_tensor.numel()} elements"
        )
    return combined_tensor[index : index + size]


def is_combined_tensor_valid(combined_tensor: Tensor | None, list_of_tensor: Sequence[Tensor | None]) -> bool:
    """Whether every tensor still lies in the combined buffer."""
    return next(_broken(combined_tensor, list_of_tensor), None) is None


def check_combined_tensor(combined_tensor: Tensor | None, list_of_tensor: Sequence[Tensor | None]) -> None:
    """Raises RuntimeError, naming every tensor that does not lie in the combined buffer any more, and why."""
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
