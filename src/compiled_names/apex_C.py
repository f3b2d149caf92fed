"""Upstream's compiled module of this name: tensors flattened into one, and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from apex.parallel import _flat


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of all tensors, one after the other, as a new vector; of a single one, a view if it can be."""
    return _flat.flatten(_checked(tensors))


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """`flat` in pieces of the shapes of `tensors`, which share its memory."""
    wanted = sum(tensor.numel() for tensor in _checked(tensors))
    if flat.dim() != 1 or flat.numel() != wanted:
        raise ValueError(f"flat has shape {tuple(flat.shape)}; tensors make a vector of {wanted} elements")
    return _flat.unflatten(flat, tensors)


def _checked(tensors: Sequence[Tensor]) -> list[Tensor]:
    tensors = list(tensors)
    if not tensors:
        raise ValueError("tensors is empty; at least one tensor is expected")
    for index, tensor in enumerate(tensors):
        if tensor.is_sparse:
            raise TypeError(f"tensors[{index}] is sparse; only dense tensors are accepted")
    return tensors
