"""How many tensors share a memory: whether a gradient may be replaced, or a buffer used again, unnoticed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from ..ops._host import HOST

# Missing in some older PyTorch that was built without CUDA; every gradient counts as shared then.
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
USES_ARE_KNOWN = _use_count is not None


def storage_uses(tensor: Tensor) -> int:
    """How many tensors have this one's memory, it included, and a constant; -1 where this cannot be told."""
    return -1 if _use_count is None else _use_count(tensor.untyped_storage()._cdata)


def _uses_of_gradient(param: Tensor) -> tuple[int, int]:
    gradient = param.grad
    assert gradient is not None
    return sys.getrefcount(gradient), storage_uses(gradient)


@functools.cache
def _uses_if_unshared() -> tuple[int, int]:
    """What `_uses_of_gradient` gives for a gradient that nobody holds but its parameter."""
    param = torch.empty(1, dtype=torch.float32, device=HOST, requires_grad=True)
    param.grad = torch.empty_like(param)
    return _uses_of_gradient(param)


def gradient_is_unshared(param: Tensor) -> bool:
    """Whether nobody would notice if `param.grad` became another tensor with the same values."""
    if _use_count is None or type(param.grad) is not Tensor or param.grad.requires_grad:
        return False
    return _uses_of_gradient(param) == _uses_if_unshared()
