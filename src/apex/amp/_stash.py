"""What amp keeps beside an optimizer, and how its gradients get from scaled to unscaled, and to the masters.

Three kinds of parameters: half-precision ones of the model that have a float32 master (the master takes their place in
the optimizer's groups), float32 ones (their own masters), and half-precision ones without a master (O3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .scaler import LossScaler

HALF = (torch.float16, torch.bfloat16)


class AmpOptimizerState:
    """Amp's data on one optimizer: `optimizer._amp_stash`."""

    def __init__(self) -> None:
        self.lazy_init_called = False
        self.already_patched = False
        self.params_have_scaled_gradients = False
        self.has_masters = False
        # Whether the last backward pass overflowed, for optimizers that can be told on the device.
        self.noop: Tensor | None = None
        # Parallel lists: a model's half-precision parameters and their masters.
        self.all_fp16_params: list[Tensor] = []
        self.all_fp32_from_fp16_params: list[Tensor] = []
        # Parameters that the optimizer updates directly.
        self.all_fp32_from_fp32_params: list[Tensor] = []
        # Gradients that were there before the backward pass that is under way.
        self.stashed: dict[Tensor, Tensor] = {}

    @property
    def all_fp32_params(self) -> list[Tensor]:
        return self.all_fp32_from_fp16_params + self.all_fp32_from_fp32_params


def make_masters(optimizer: Any, originals: dict[Tensor, Tensor]) -> None:
    """Replaces the half-precision parameters in the optimizer's groups by float32 masters.

    `originals` holds values from before the model was cast, which are more exact than its parameters are now.
    """
    stash: AmpOptimizerState = optimizer._amp_stash
    for group in optimizer.param_groups:
        for index, param in enumerate(group["params"]):
            group["params"][index] = _master_for(optimizer, stash, param, originals)


def _master_for(optimizer: Any, stash: AmpOptimizerState, param: Tensor, originals: dict[Tensor, Tensor]) -> Tensor:
    if not param.requires_grad or param.dtype not in HALF:
        if param.requires_grad:
            stash.all_fp32_from_fp32_params.append(param)
        return param
    value = originals.get(param)
    master = Parameter(param.detach().float() if value is None else value.detach().clone())
    stash.all_fp16_params.append(param)
    stash.all_fp32_from_fp16_params.append(master)
    if param in optimizer.state:
        optimizer.state[master] = {
            name: value.float() if isinstance(value, Tensor) and value.dtype in HALF else value
            for name, value in optimizer.state.pop(param).items()
        }
    return master


def collect_params(optimizer: Any) -> None:
    """Notes the parameters of an optimizer without masters."""
    stash: AmpOptimizerState = optimizer._amp_stash
    stash.all_fp32_from_fp32_params = [
        param for group in optimizer.param_groups for param in group["params"] if param.requires_grad
    ]


def before_backward(stash: AmpOptimizerState) -> None:
    """Puts unscaled gradients aside, so that a backward pass with another scale does not add to them."""
    stash.stashed = {}
    for param in stash.all_fp16_params:
        param.grad = None  # what was there is in the master's gradient already
    for param in stash.all_fp32_from_fp32_params:
        if param.grad is not None:
            stash.stashed[param] = param.grad
            param.grad = None


class Counted(NamedTuple):
    """Parameters, and how many elements of their gradients were infinite and NaN: int32 [parameters, 2]."""

    params: list[Tensor]
    culprits: Tensor


def after_backward(stash: AmpOptimizerState, scaler: LossScaler) -> list[Counted]:
    """Unscales the new gradients and adds them to what was there before."""
    fresh, added = _Lists(), _Lists()
    for param, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
        if param.grad is None:
            continue
        if master.grad is None:
            master.grad = torch.empty_like(master)
            fresh.add(param, param.grad, master.grad)
        else:
            added.add(param, param.grad, master.grad, master.grad)
    in_place = _Lists()
    for param in stash.all_fp32_from_fp32_params:
        earlier = stash.stashed.get(param)
        if param.grad is None:
            param.grad = earlier
        elif earlier is None:
            in_place.add(param, param.grad, param.grad)
        else:
            added.add(param, param.grad, param.grad, earlier)
    stash.stashed = {}
    counted = []
    for lists, are_masters in ((fresh, False), (in_place, True)):
        if lists.params:
            culprits = lists.counters()
            scaler.unscale(lists.grads, lists.outputs, models_are_masters=are_masters, culprits=culprits)
            counted.append(Counted(lists.params, culprits))
    if added.params:
        culprits = added.counters()
        scaler.unscale_with_stashed(added.grads, added.earlier, added.outputs, culprits=culprits)
        counted.append(Counted(added.params, culprits))
    return counted


class _Lists:
    """Parameters whose gradients take the same way."""

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.earlier: list[Tensor] = []

    def add(self, param: Tensor, grad: Tensor, output: Tensor, earlier: Tensor | None = None) -> None:
        self.params.append(param)
        self.grads.append(grad)
        self.outputs.append(output)
        if earlier is not None:
            self.earlier.append(earlier)

    def counters(self) -> Tensor:
        return torch.zeros(len(self.params), 2, dtype=torch.int32, device=self.grads[0].device)


def masters_to_model(stash: AmpOptimizerState, copy: Callable[[list[Tensor], list[Tensor]], None]) -> None:
    """Gives the model's parameters the values of their masters."""
    if stash.all_fp16_params:
        copy(
            [master.detach() for master in stash.all_fp32_from_fp16_params], [p.detach() for p in stash.all_fp16_params]
        )
