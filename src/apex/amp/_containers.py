"""Apply a function to tensors in nested containers."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserList, deque
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


# isinstance with tuples of types: PyTorch up to 2.9 cannot compile unions there.
def applier(value: Any, fn: Callable[[Any], Any], _inside: tuple[int, ...] = ()) -> Any:
    """Apply `fn` to every tensor, and every object with a `to` method, in nested containers; they keep their type.

    Containers are dicts, lists, tuples, sets, deques and their subclasses, other mappings, SimpleNamespaces, and
    dataclasses without a `to` method. Built-in containers and named tuples are always made again. Others are copied,
    with all their other contents, only if `fn` changed something in them. `_inside` holds the ids of the objects around
    `value`, to stop at cycles.
    """
    if isinstance(value, Tensor):
        return fn(value)
    kind = type(value)
    if kind in (dict, OrderedDict):
        return kind((applier(key, fn, _inside), applier(item, fn, _inside)) for key, item in value.items())
    if kind in (list, tuple, set, frozenset):
        return kind([applier(item, fn, _inside) for item in value])
    if value is None or isinstance(value, (str, bytes, bool, int, float)):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*[applier(item, fn, _inside) for item in value])
    if isinstance(value, (tuple, set, frozenset)):
        items = [applier(item, fn, _inside) for item in value]
        return value if all(map(_same, value, items)) else kind(items)
    if isinstance(value, Mapping):
        return _with_items(value, _changes(value.items(), fn, _inside))
    if isinstance(value, (list, deque, UserList)):
        return _with_items(value, _changes(enumerate(value), fn, _inside))
    if hasattr(value, "to"):  # batches with their own method
        return fn(value)
    if isinstance(value, SimpleNamespace) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return value if id(value) in _inside else _with_attributes(value, fn, (*_inside, id(value)))
    return value


def _same(before: Any, after: Any) -> bool:
    """Return whether two values are the same object, or built-in containers of the same objects."""
    if type(before) in (list, tuple):
        return all(map(_same, before, after))
    if type(before) in (dict, OrderedDict):
        return all(map(_same, before.values(), after.values()))
    return before is after


def _changes(items: Iterable[tuple[Any, Any]], fn: Callable[[Any], Any], inside: tuple[int, ...]) -> dict[Any, Any]:
    """Return the items that `fn` changes, after the change, by name or index."""
    applied = [(key, item, applier(item, fn, inside)) for key, item in items]
    return {key: after for key, before, after in applied if not _same(before, after)}


def _with_items(original: Any, changes: dict[Any, Any]) -> Any:
    """Return a copy of a mapping or list with changed items; a dict if a mapping cannot be copied and changed."""
    if not changes:
        return original
    if torch.compiler.is_compiling() and isinstance(original, Mapping) and dataclasses.is_dataclass(original):
        # Outputs of transformers. Dynamo of PyTorch 2.11, unlike that of 2.13, splits graphs at copy.copy, and a loss
        # behind it reads all logits from memory.
        return type(original)(**{**original, **changes})
    try:
        copied = copy.copy(original)
        for key, item in changes.items():
            copied[key] = item
    except Exception:  # read-only mappings, and classes with their own constructor
        if not isinstance(original, Mapping):
            raise
        items = {**original, **changes}
        try:
            return type(original)(items)  # type: ignore[call-arg]
        except TypeError:
            return items
    return copied


def _with_attributes(original: Any, fn: Callable[[Any], Any], inside: tuple[int, ...]) -> Any:
    """Return a copy with changed attributes, even if the object is frozen; the original if nothing changes."""
    if isinstance(original, SimpleNamespace):
        names = list(vars(original))
    else:
        names = [field.name for field in dataclasses.fields(original) if hasattr(original, field.name)]
    changes = _changes([(name, getattr(original, name)) for name in names], fn, inside)
    if not changes:
        return original
    copied = copy.copy(original)
    for name, item in changes.items():
        object.__setattr__(copied, name, item)
    return copied


def to_type(dtype: torch.dtype, value: Any) -> Any:
    """Cast a floating-point tensor to `dtype`; return other tensors unchanged; call `to` of other objects."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return value.to(dtype)
