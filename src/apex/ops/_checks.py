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
    """Raise TypeError for the first keyword argument that is not a tensor."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")


def check_optional_tensors(**arguments: Any) -> None:
    """Raise TypeError for the first keyword argument that is neither a tensor nor None."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor or None, got {type(value).__name__}")


def check_floats(**arguments: Any) -> None:
    """Raise TypeError for the first keyword argument that is not a floating-point tensor."""
    for name, value in arguments.items():
        if type(value) not in PLAIN:
            check_tensors(**{name: value})
        if not value.is_floating_point():
            raise TypeError(f"{name} must be floating-point, got {value.dtype}")


def integer(name: str, value: Any) -> int:
    """Return `value` as an int; raise TypeError for floats, even whole ones."""
    if isinstance(value, int):
        return value
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} must be an integer") from None


def number(name: str, value: Any) -> float:
    """Return `value` as a float, as `float` does, strings of digits included; raise TypeError with its name if not."""
    if isinstance(value, float):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be a number, got {value!r:.40} of type {type(value).__name__}") from None


def at_hand(tensor: Tensor) -> bool:
    """Return whether a tensor's values can be read now, without a device synchronisation or a graph break."""
    return type(tensor) is Tensor and tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def values_at_hand(tensor: Tensor) -> list[Any] | None:
    """Return the elements of a tensor as a list if it is `at_hand`, otherwise None."""
    return tensor.tolist() if at_hand(tensor) else None


def check_parameters(input: Tensor, shape: tuple[int, ...], **parameters: Tensor | None) -> None:
    """Raise for a named parameter that is not a floating-point tensor of this shape on the input's device."""
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
    """Raise ValueError if a tensor, such as a gradient, does not have this shape or is not on this device."""
    if tuple(tensor.shape) != tuple(shape) or tensor.device != device:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)} on {tensor.device}, expected {list(shape)} on {device}"
        )
