"""Checks that several families make of their arguments."""

from __future__ import annotations

from torch import Tensor


def check_per_channel(input: Tensor, channels: int, **parameters: Tensor | None) -> None:
    """Raises for parameters, given by name, that do not have a value for each channel on the input's device."""
    for name, parameter in parameters.items():
        if parameter is None:
            continue
        if parameter.shape != (channels,):
            raise ValueError(
                f"{name} has shape {list(parameter.shape)}, expected one value for each of {channels} channels"
            )
        if parameter.device != input.device:
            raise ValueError(f"{name} is on {parameter.device}, the input on {input.device}")
        if not parameter.is_floating_point():
            raise TypeError(f"{name} must be floating-point, got {parameter.dtype}")
