"""Answers to questions about PyTorch's age, which are the same for every version that this package runs on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def variable_is_tensor() -> bool:
    """Whether `torch.autograd.Variable` is a tensor: it is."""
    return True


def tensor_is_variable() -> bool:
    """Whether a tensor is a `torch.autograd.Variable`: it is."""
    return True


def tensor_is_float_tensor() -> bool:
    """Whether every tensor is an instance of `torch.FloatTensor`: no, that depends on its dtype."""
    return False


def is_tensor_like(x: Any) -> bool:
    """Whether `x` is a tensor."""
    return isinstance(x, Tensor)


def is_floating_point(x: Tensor) -> bool:
    """Whether the tensor holds floating-point numbers."""
    return torch.is_floating_point(x)


def scalar_python_val(x: Any) -> Any:
    """The number that a tensor of one element holds; a number as it is."""
    return x.item() if isinstance(x, Tensor) else x


def filter_attrs(module: Any, attrs: Iterable[str]) -> list[str]:
    """Those names that `module` has."""
    return [name for name in attrs if hasattr(module, name)]
