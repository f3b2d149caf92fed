"""Loss scales as plain numbers, for training loops that scale losses themselves.

`FP16_Optimizer` and `apex.amp` use `apex.amp.scaler.LossScaler`, which keeps the scale on the device.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..amp._amp_state import HALF
from ..amp._checks import check_count, checked_number, checked_scale
from ..ops.multi_tensor import max_norm


def to_python_float(t: Any) -> float:
    """Return the number in a tensor of one element, or the first element of a sequence."""
    return t.item() if hasattr(t, "item") else t[0]


def scaled_backward(loss: Tensor, scale: float, retain_graph: bool) -> None:
    """Run a backward pass from `scale` times the loss, in float32 if the loss is in half precision."""
    exact = loss.float() if loss.dtype in HALF else loss
    (exact * scale).backward(retain_graph=retain_graph)


class _Scaler:
    """A loss scale and its two uses: on a loss, and on gradients in a backward hook."""

    cur_scale: float

    @property
    def loss_scale(self) -> float:
        """Return the current scale."""
        return self.cur_scale

    def scale_gradient(self, module: Any, grad_in: Iterable[Tensor | None], grad_out: Any) -> tuple[Tensor | None, ...]:
        """Multiply the gradients of a module's inputs by the scale; usable as a module's backward hook."""
        return tuple(None if gradient is None else self.loss_scale * gradient for gradient in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run a backward pass from the scaled loss, cast to float32 first if it is in half precision."""
        scaled_backward(loss, self.loss_scale, retain_graph)


class LossScaler(_Scaler):
    """A static loss scale; gradients are never checked."""

    def __init__(self, scale: float = 1) -> None:
        checked_scale("scale", scale)
        self.cur_scale = scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return False: a static scale skips no step."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Do nothing: the scale is static."""


class DynamicLossScaler(_Scaler):
    """A dynamic loss scale, kept as high as gradients allow.

    It starts at `init_scale`. An overflow divides it by `scale_factor`, though never below 1, and the step must be
    skipped. After `scale_window` updates in a row without overflow it is multiplied by `scale_factor`.
    """

    def __init__(self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        checked_scale("init_scale", init_scale)
        above_one = math.nextafter(1.0, 2.0)
        checked_number("scale_factor", scale_factor, above_one, sys.float_info.max, "a finite number greater than 1")
        check_count("scale_window", scale_window)
        self.cur_scale = init_scale
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return whether any gradient of `params` has an infinite or NaN element; waits for the device."""
        return _any_non_finite(param.grad for param in params if param.grad is not None)

    @staticmethod
    def _has_inf_or_nan(x: Tensor) -> bool:
        return _any_non_finite([x])

    def update_scale(self, overflow: bool) -> None:
        """Adapt the scale; call it once per iteration with the result of `has_overflow`."""
        adapt_scale(self, overflow)


def adapt_scale(scaler: Any, overflow: bool) -> None:
    """Lower a dynamic scale after an overflow, raise it after `scale_window` iterations without; count this one."""
    if overflow:
        scaler.cur_scale = max(scaler.cur_scale / scaler.scale_factor, 1)
        scaler.last_overflow_iter = scaler.cur_iter
    elif (scaler.cur_iter - scaler.last_overflow_iter) % scaler.scale_window == 0:
        scaler.cur_scale *= scaler.scale_factor
    scaler.cur_iter += 1


def _any_non_finite(tensors: Iterable[Tensor]) -> bool:
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        values = tensor.detach()
        by_device.setdefault(values.device, []).append(values._values() if values.is_sparse else values)
    flags = []
    for device, device_values in by_device.items():
        flag = torch.zeros(1, dtype=torch.float32, device=device)
        max_norm(device_values, overflow=flag)
        flags.append(flag)
    return any(bool(flag.item()) for flag in flags)
