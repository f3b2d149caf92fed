"""What the tensors of an attention with mask and bias must look like."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Shape, strides, dtype and device of a tensor: all that checks and plans need to know of it.
Kind = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


def kind(tensor: Tensor) -> Kind:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None) -> None:
    """Raises for tensors that do not fit together."""
    check_kinds(
        kind(query),
        kind(key),
        kind(value),
        None if mask is None else kind(mask),
        None if bias is None else kind(bias),
    )


def check_kinds(query: Kind, key: Kind, value: Kind, mask: Kind | None, bias: Kind | None) -> None:
    """As `check`, for tensors of these kinds."""
    shape, _, dtype, device = query
    of_keys = key[0]
    if len(shape) < 3 or len(of_keys) != len(shape):
        raise ValueError(
            f"query and key have shapes {list(shape)} and {list(of_keys)}; both must be [..., heads, length, head size]"
        )
    if of_keys[:-2] != shape[:-2] or of_keys[-1] != shape[-1] or shape[-1] == 0:
        raise ValueError(
            f"query and key have shapes {list(shape)} and {list(of_keys)}; they may differ in their length only"
        )
    if value[0] != of_keys:
        raise ValueError(f"value has shape {list(value[0])}, key has {list(of_keys)}; they must be equal")
    logits = (*shape[:-1], of_keys[-2])
    for name, given in (("mask", mask), ("bias", bias)):
        if given is not None and not _broadcasts(given[0], logits):
            raise ValueError(f"{name} has shape {list(given[0])}, which does not broadcast to {list(logits)}")
    if not dtype.is_floating_point:
        raise TypeError(f"attention needs floating-point tensors, query is {dtype}")
    for name, given in (("key", key), ("value", value), ("mask", mask), ("bias", bias)):
        if given is not None and given[3] != device:
            raise ValueError(f"{name} is on {given[3]}, query on {device}")
        if name in ("key", "value") and given is not None and given[2] != dtype:
            raise TypeError(f"{name} is {given[2]}, query {dtype}; they must be equal")


def _broadcasts(shape: Sequence[int], full: Sequence[int]) -> bool:
    padding = len(full) - len(shape)
    return padding >= 0 and all(size in (1, wanted) for size, wanted in zip(shape, full[padding:], strict=True))
