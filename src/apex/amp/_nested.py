"""Tensors in nested containers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def applier(value: Any, fn: Callable[[Any], Any]) -> Any:
    """`fn` on every tensor in nested containers, and on whatever else has a `to` method."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, str) or value is None:
        return value
    if isinstance(value, Mapping):
        return _rebuilt_mapping(value, {applier(key, fn): applier(item, fn) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(applier(item, fn) for item in value))
    if isinstance(value, (list, tuple, set, frozenset)):  # PyTorch up to 2.9 cannot compile a union here
        return type(value)(applier(item, fn) for item in value)
    if hasattr(value, "to"):  # batches with a method of their own
        return fn(value)
    return value


def _rebuilt_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return items
    try:
        return type(original)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def to_type(dtype: torch.dtype, value: Any) -> Any:
    """A floating-point tensor cast to `dtype`, any other tensor as it is; other objects cast themselves."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return value.to(dtype)
