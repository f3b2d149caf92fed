"""Wrappers whose last pass was inside of `no_sync`: gradients are this process's own."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WRAPPERS: WeakSet[nn.Module] = WeakSet()


def holds_any(params: Iterable[Tensor]) -> bool:
    """Return whether one of `params` belongs to a wrapper whose last pass was inside of `no_sync`."""
    own = {id(param) for wrapper in WRAPPERS for param in wrapper.parameters()}
    return any(id(param) in own for param in params)


def note_forward() -> None:
    """Note a forward pass in torch's DistributedDataParallel, if one runs: it decides what the backward pass does."""
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is not None and torch.is_grad_enabled():
        (WRAPPERS.discard if wrapper.require_backward_grad_sync else WRAPPERS.add)(wrapper)
