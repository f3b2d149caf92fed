"""Copies of the state of a training, to put it back after a trial."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..optimizers._state_dicts import show_own_entries


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


class ForwardSnapshot:
    """Copies of all state that a forward and a backward pass change: gradients, buffers, random number generators."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._gradients = [(param, _copied(param.grad)) for model in models for param in model.parameters()]
        self._buffers = [(buffer, _copied(buffer)) for model in models for buffer in model.buffers()]
        self._host = torch.get_rng_state()
        has_devices = torch.accelerator.is_available()
        self._module = torch.get_device_module() if has_devices else None
        self._device = None if self._module is None else self._module.get_rng_state()

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back. Buffers keep their memory, because graphs refer to it."""
        for param, gradient in self._gradients:
            param.grad = _copied(gradient)
        for buffer, value in self._buffers:
            buffer.copy_(value)
        torch.set_rng_state(self._host)
        if self._module is not None:
            self._module.set_rng_state(self._device)


class TrainingSnapshot(ForwardSnapshot):
    """Copies of all state that a training step changes: a ForwardSnapshot, parameters, optimizers, loss scales.

    `wrappers` are the boosted optimizers, which have the loss scales.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Any], wrappers: Sequence[Any] = ()) -> None:
        super().__init__(models)
        show_own_entries(optimizers)
        self._scales = [(wrapper, copy.deepcopy(wrapper.scaler_state())) for wrapper in wrappers]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        params = [param for group in groups for param in group["params"]]
        params += [param for model in models for param in model.parameters()]
        self._params = [(param, _copied(param)) for param in {id(param): param for param in params}.values()]
        self._groups = [(group, {**group}, {name: _copied(value) for name, value in group.items()}) for group in groups]
        self._states = [
            (optimizer, {param: {**state} for param, state in optimizer.state.items()}, _deep(optimizer.state))
            for optimizer in optimizers
        ]

    @torch.no_grad()
    def restore(self) -> None:
        super().restore()
        for wrapper, state in self._scales:
            wrapper.load_scaler_state(copy.deepcopy(state))
        for param, value in self._params:
            param.copy_(value)
        for group, own, saved in self._groups:
            group.clear()
            group.update({name: _restored(own[name], value) for name, value in saved.items()})
        for optimizer, own, saved in self._states:
            optimizer.state.clear()
            for param, state in saved.items():
                optimizer.state[param] = {name: _restored(own[param][name], value) for name, value in state.items()}


def _deep(state: Any) -> dict[Any, dict[str, Any]]:
    return {param: {name: _copied(value) for name, value in values.items()} for param, values in state.items()}


def _restored(own: Any, value: Any) -> Any:
    """Return the saved value, in the memory that it had if it is a tensor."""
    return own.copy_(value) if isinstance(own, Tensor) else value
