"""Float32 master weights of half-precision parameters: beside an optimizer, or in its state."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ..amp._amp_state import HALF
from ..optimizers._base import LOW_PRECISION, FusedOptimizer
from ..optimizers._buckets import MASTER
from ..optimizers._formats import has_master, master_of, set_master


class Masters:
    """Master weights: float32 copies that replace an optimizer's half-precision parameters in its groups."""

    # Reading the values needs no other process.
    is_local = True

    def __init__(self, optimizer: Any, exact: dict[Tensor, Tensor]) -> None:
        """Make master weights for all groups. `exact` has the values of parameters before they were cast."""
        # The optimizer refers to this dict too: ASP looks up a parameter's master there.
        self._master_of: dict[Tensor, Tensor] = {}
        self._taken: list[tuple[Tensor | None, int]] = []  # the gradients that masters have copies of
        optimizer._master_of = self._master_of
        for group in optimizer.param_groups:
            self.add(optimizer, group, exact)
        if hasattr(optimizer, "register_step_pre_hook"):
            optimizer.register_step_pre_hook(functools.partial(_refuse_step_without_gradients, self._master_of))
        own: Any = weakref.ref(optimizer)  # a reference cycle would keep an unused optimizer in memory

        def zero_grad(set_to_none: bool = True) -> None:
            """Zero the gradients of the optimizer's parameters and of the model's half-precision parameters."""
            type(own()).zero_grad(own(), set_to_none)
            self.zero_gradients(set_to_none)

        optimizer.zero_grad = zero_grad

    def add(self, optimizer: Any, group: dict[str, Any], exact: dict[Tensor, Tensor]) -> None:
        """Replace the half-precision parameters of a group by masters, which take over their optimizer state."""
        for index, param in enumerate(group["params"]):
            if param.dtype not in HALF:
                continue
            master = nn.Parameter(exact.get(param, param.detach()).float(), requires_grad=param.requires_grad)
            vars(master).update(vars(param))  # attributes that tensor-parallel layers set on their parameters
            group["params"][index] = self._master_of[param] = master
            if param in optimizer.state:
                optimizer.state[master] = optimizer.state.pop(param)

    def take_gradients(self) -> None:
        """Copy gradients from parameters to masters, in float32.

        Parameters keep theirs, so that `zero_grad` of the model, and a backward pass without it, act as in PyTorch.
        """
        self._taken = self._gradients()
        for param, master in self._master_of.items():
            master.grad = None if param.grad is None else param.grad.float()

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        """Return the gradients of parameters and their version counters."""
        return [(param.grad, 0 if param.grad is None else param.grad._version) for param in self._master_of]

    def check_taken(self) -> None:
        """Raise if gradients of parameters have changed since masters took them, because a step would not see it."""
        pairs = zip(self._taken, self._gradients(), strict=False)
        if any(before is not now or version != number for (before, version), (now, number) in pairs):
            raise RuntimeError(
                "gradients of the model have changed since they were clipped or unscaled, and float32 copies of the "
                "earlier ones are in the optimizer: clip by optimizer.clip_grad_by_norm or clip_grad_by_value, after "
                "the last backward pass of a step"
            )

    def drop_gradients(self) -> None:
        """Free the gradients of masters after a step."""
        self._taken = []
        for master in self._master_of.values():
            master.grad = None

    def zero_gradients(self, set_to_none: bool) -> None:
        """Set the gradients of parameters to None or zero, and the gradients of masters to None."""
        self.drop_gradients()
        for param in self._master_of:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach().zero_()

    @torch.no_grad()
    def update_model(self) -> None:
        """Copy the masters to the parameters."""
        if self._master_of:
            torch._foreach_copy_(list(self._master_of), list(self._master_of.values()))

    def read(self) -> dict[Tensor, Tensor]:
        """Return the masters by parameter."""
        return {param: master.detach() for param, master in self._master_of.items()}

    @torch.no_grad()
    def write(self, values: dict[Tensor, Tensor]) -> None:
        """Set the masters, and the parameters, of some parameters to these values."""
        for param, value in values.items():
            if param in self._master_of:
                self._master_of[param].copy_(value)
        self.update_model()


def _refuse_step_without_gradients(master_of: dict[Tensor, Tensor], *_: Any) -> None:
    """Raise if an optimizer is stepped itself, so that its masters have not taken the gradients of the model."""
    if any(param.grad is not None and master.grad is None for param, master in master_of.items()):
        raise RuntimeError(
            "this optimizer was given to boost, and its step would update nothing, because the gradients are in the "
            "half-precision parameters of the model: call step() of the optimizer that boost returned"
        )


class StateMasters:
    """Master weights in the state of a fused optimizer, which updates them and the half-precision parameters at once.

    They are float32 copies or, with `master_bits`, the bits that parameters lack. The methods are the same as in
    `Masters`. Gradients stay on the parameters, in half precision.
    """

    is_local = True

    def __init__(self, optimizer: FusedOptimizer, exact: dict[Tensor, Tensor]) -> None:
        """Make the optimizer's whole state, so that it can be saved before the first step."""
        self._optimizer: Any = optimizer  # the state dict of the model needs it, also when nobody else does
        for group in optimizer.param_groups:
            self.add(optimizer, group, exact)

    def add(self, optimizer: Any, group: dict[str, Any], exact: dict[Tensor, Tensor]) -> None:
        """Make the state of a group's half-precision parameters; `exact` has their values before they were cast.

        A float32 value becomes the master itself. A copy would take the same memory, but the value's memory, freed
        among the smaller half-precision parameters, could not be released: 300 MiB of a BERT-base in a simulation.
        """
        for param in group["params"]:
            if param.dtype in LOW_PRECISION:
                value = exact.get(param, param).detach()
                is_master = value.dtype == torch.float32 and value.stride() == param.stride()
                if is_master and optimizer.master_bits is None:
                    optimizer.state[param].setdefault(MASTER, value)
                state, _ = optimizer._prepare(param, group, optimizer._state_names(group))
                if state.get(MASTER) is not value:
                    with torch.no_grad():
                        set_master(optimizer, state, param, value)
        if optimizer._counts_steps:
            group.setdefault("step", 0)

    @torch.no_grad()
    def add_missing(self, masters: dict[Tensor, Tensor], loaded: dict[str, Any]) -> None:
        """Put back masters that the loaded state dict lacks, because the saved optimizer had none."""
        optimizer = self._optimizer
        keys = [key for group in loaded["param_groups"] for key in group["params"]]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for key, param in zip(keys, params, strict=True):
            if param in masters and not has_master(loaded["state"].get(key, {})):
                set_master(optimizer, optimizer.state[param], param, masters[param])

    def take_gradients(self) -> None:
        """Do nothing: the optimizer reads the gradients of the parameters."""

    def drop_gradients(self) -> None:
        """Do nothing: only the parameters have gradients."""

    def update_model(self) -> None:
        """Do nothing: a step of the optimizer has updated the parameters."""

    def read(self) -> dict[Tensor, Tensor]:
        """Return the masters by parameter."""
        state = self._optimizer.state
        return {param: master_of(values, param) for param, values in state.items() if has_master(values)}

    @torch.no_grad()
    def write(self, values: dict[Tensor, Tensor]) -> None:
        """Set the masters, and the parameters, of some parameters to these values."""
        optimizer = self._optimizer
        for param, value in values.items():
            if has_master(optimizer.state.get(param, {})):
                set_master(optimizer, optimizer.state[param], param, value)


def has_state_masters(optimizer: Any) -> bool:
    """Return whether an optimizer keeps masters of bfloat16 parameters in its own state."""
    return isinstance(optimizer, FusedOptimizer) and (optimizer.master_weights or optimizer.master_bits is not None)
