"""Wrappers whose last backward pass was inside of `no_sync`: gradients are this process's own."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

from torch import Tensor, nn

WRAPPERS: WeakSet[nn.Module] = WeakSet()


def holds_any(params: Iterable[Tensor]) -> bool:
    """Return whether one of `params` belongs to a wrapper whose last backward pass was inside of `no_sync`."""
    own = {id(param) for wrapper in WRAPPERS for param in wrapper.parameters()}
    return any(id(param) in own for param in params)
