"""Checks of the arguments of amp's functions, by name and value, before anything changes."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

# Scales and their reciprocals are float32.
_SMALLEST, _LARGEST = torch.finfo(torch.float32).smallest_normal, torch.finfo(torch.float32).max

# Beginnings of the modules of optimizers whose algorithms are known.
OWNERS = ("torch.optim.", "apex.")


def has_known_step(optimizer: Any) -> bool:
    """Return whether an optimizer has a step of PyTorch or apex; a class that overrides it is another algorithm."""
    return getattr(getattr(type(optimizer), "step", None), "__module__", "").startswith(OWNERS)


def is_flag(value: Any) -> bool:
    """Return whether a value can be a flag: a bool, an integer, a NumPy bool, or None for "not given"."""
    return value is None or isinstance(value, int) or type(value).__name__ in ("bool", "bool_")


def check_flags(**flags: Any) -> None:
    """Raise TypeError if any argument, passed by name, is no flag (`is_flag`)."""
    for name, value in flags.items():
        if not is_flag(value):
            raise TypeError(f"{name} must be True or False, not {value!r}")


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raise an error unless the value is an integer of at least `least`."""
    try:
        valid = not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:
        valid = False
    if not valid:
        kind = ValueError if isinstance(value, int) else TypeError
        raise kind(f"{name} must be an integer of at least {least}, not {value!r}")


def check_type(name: str, value: Any, accepted: tuple[torch.dtype, ...] = ()) -> None:
    """Raise an error unless the value is None or an accepted dtype; by default all floating-point dtypes are."""
    if value is None:
        return
    names = ", ".join(map(str, accepted)) if accepted else "a floating-point torch.dtype, as torch.float16,"
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{name} must be {names} or None, not {value!r}")
    if value not in accepted if accepted else not value.is_floating_point:
        raise ValueError(f"{name} must be {names} or None, not {value}")


def checked_number(name: str, value: Any, low: float, high: float, accepted: str) -> float:
    """Return the value as a float; raise an error unless it is in [low, high], described by `accepted`."""
    try:
        if isinstance(value, (str, bytes, bool)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be {accepted}, not {value!r}") from None
    if not low <= number <= high:  # also rejects NaN
        raise ValueError(f"{name} must be {accepted}, not {number}")
    return number


def checked_scale(name: str, value: Any, or_else: str = "") -> float:
    """Return the value as a float; raise an error unless it can be a loss scale."""
    return checked_number(name, value, _SMALLEST, _LARGEST, f"a positive number that is finite in float32{or_else}")


def checked_loss_scale(name: str, value: Any) -> float | str:
    """Return a loss scale as a number, which may be passed as a string, or "dynamic"."""
    if isinstance(value, str) and value != "dynamic":
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"{name} must be a positive number or 'dynamic', not {value!r}") from None
    return value if isinstance(value, str) else checked_scale(name, value, ", or 'dynamic'")


def check_scaling(
    *,
    init_scale: Any,
    scale_factor: Any,
    scale_window: Any,
    min_loss_scale: Any,
    max_loss_scale: Any,
    backoff_factor: Any,
    names: dict[str, str] | None = None,
) -> None:
    """Raise an error for invalid settings of a dynamic scale; `names` maps argument names to the caller's names."""
    called = {"init_scale": "init_scale", "scale_factor": "scale_factor", "backoff_factor": "backoff_factor"}
    called.update(names or {})
    checked_scale(called["init_scale"], init_scale)
    checked_number(called["scale_factor"], scale_factor, 1.0, _LARGEST, "a finite number of at least 1")
    if backoff_factor is not None:
        checked_number(called["backoff_factor"], backoff_factor, _SMALLEST, 1.0, "a number above 0 and up to 1")
    check_count("scale_window", scale_window)
    ceiling = checked_number("max_loss_scale", max_loss_scale, _SMALLEST, math.inf, "a positive number")
    if min_loss_scale is not None:
        floor = checked_number(
            "min_loss_scale", min_loss_scale, 0.0, _LARGEST, "a finite number of at least 0, or None"
        )
        if floor > ceiling:
            raise ValueError(f"min_loss_scale={floor} is above max_loss_scale={ceiling}")


def check_loss(loss: Any) -> None:
    """Raise TypeError unless a loss is a floating-point tensor."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss must be a tensor, not {type(loss).__name__}")
    if not loss.is_floating_point():
        raise TypeError(f"loss must be a tensor of floating-point numbers, not of {loss.dtype}")


def checked_optimizers(optimizers: Any) -> list[Any]:
    """Return one optimizer, or a list or tuple of them, as a list; raise TypeError if one has no `param_groups`."""
    listed = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    for optimizer in listed:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"optimizers must be an optimizer or a list of them, not {type(optimizer).__name__}")
    return listed


def check_known(optimizers: list[Any]) -> None:
    """Raise an error for optimizers unknown to amp, such as copies: their steps would not change the model."""
    for optimizer in optimizers:
        if not hasattr(optimizer, "_amp_stash"):
            raise RuntimeError(
                f"amp.scale_loss was given an optimizer ({type(optimizer).__name__}) that amp.initialize has not seen"
            )
