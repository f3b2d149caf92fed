"""Checks that several families make of their arguments."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._library import PLAIN, TRITON_DTYPES

FLOATS = TRITON_DTYPES | {torch.float64}


def check_tensors(**arguments: Any) -> None:
    """Raises for the first argument, given by name, that is no tensor."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")


def check_optional_tensors(**arguments: Any) -> None:
    """Raises for the first argument, given by name, that is neither a tensor nor None."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor or None, got {type(value).__name__}")


def check_floats(**arguments: Any) -> None:
    """Raises for the first argument, given by name, that is no floating-point tensor."""
    for name, value in arguments.items():
        if type(value) not in PLAIN:
            check_tensors(**{name: value})
        if not value.is_floating_point():
            raise TypeError(f"{name} must be floating-point, got {value.dtype}")


def integer(name: str, value: Any) -> int:
    """`value` as an int, which floats are not, not even whole ones."""
    if isinstance(value, int):
        return value
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} must be an integer") from None


def at_hand(tensor: Tensor) -> bool:
    """Whether a tensor's values can be read: this waits for no device and belongs into no graph."""
    return type(tensor) is Tensor and tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def values_at_hand(tensor: Tensor) -> list[Any] | None:
    """The elements of a tensor that is `at_hand`, else None."""
    return tensor.tolist() if at_hand(tensor) else None


def check_parameters(input: Tensor, shape: tuple[int, ...], **parameters: Tensor | None) -> None:
    """Raises for parameters, given by name, that are no floating-point tensors of this shape on the input's device."""
    device = input.device
    for name, parameter in parameters.items():
        if parameter is None:
            continue
        if type(parameter) not in PLAIN and not isinstance(parameter, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(parameter).__name__}")
        if parameter.shape != shape:
            raise ValueError(f"{name} has shape {list(parameter.shape)}, expected {list(shape)}")
        if parameter.device != device:
            raise ValueError(f"{name} is on {parameter.device}, the input on {device}")
        if parameter.dtype not in TRITON_DTYPES and not parameter.dtype.is_floating_point:
            raise TypeError(f"{name} must be floating-point, got {parameter.dtype}")


def check_shape(name: str, tensor: Tensor, shape: Sequence[int], device: torch.device) -> None:
    """Raises for a tensor, a gradient say, that does not have this shape on this device."""
    if tuple(tensor.shape) != tuple(shape) or tensor.device != device:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)} on {tensor.device}, expected {list(shape)} on {device}"
        )
