"""Upstream's compiled module of this name: flattens tensors into one vector, and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from apex.parallel import _flat


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of all tensors as one new vector; for a single tensor, return a view if possible."""
    return _flat.flatten(_checked(tensors))


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `flat` with the shapes of `tensors`."""
    count = sum(tensor.numel() for tensor in _checked(tensors))
    if flat.dim() != 1 or flat.numel() != count:
        raise ValueError(f"flat has shape {tuple(flat.shape)}; tensors make a vector of {count} elements")
    return _flat.unflatten(flat, tensors)


def _checked(tensors: Sequence[Tensor]) -> list[Tensor]:
    tensors = list(tensors)
    if not tensors:
        raise ValueError("tensors is empty; at least one tensor is expected")
    for index, tensor in enumerate(tensors):
        if tensor.is_sparse:
            raise TypeError(f"tensors[{index}] is sparse; only dense tensors are accepted")
    return tensors
