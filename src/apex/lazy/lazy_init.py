"""LazyInitContext: a context for building models without data, with Colossal-AI's arguments."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from ..logging import get_dist_logger
from ._recorded import Recorder, materialize

__all__ = ["LazyInitContext"]


class LazyInitContext:
    """A context that gives new tensors no data: it records their initialisation, which runs when a model is boosted.

    `Booster.boost` computes the values, which equal the values of a model that is built outside of the context.
    GeminiPlugin and TorchFSDPPlugin compute them parameter by parameter, and keep only the part of each process. A
    random operation runs twice: when it is recorded, so that later random numbers are the same, and for the values.

    - `tensor_cls`: no effect;
    - `default_device`: the device of tensors whose construction names none; None for torch's default device.
    """

    def __init__(self, tensor_cls: Any = None, default_device: torch.device | str | None = None) -> None:
        self.default_device = None if default_device is None else torch.device(default_device)
        self._contexts: list[contextlib.ExitStack] = []

    def __enter__(self) -> LazyInitContext:
        with contextlib.ExitStack() as stack:
            if self.default_device is not None:
                stack.enter_context(self.default_device)
            stack.enter_context(Recorder())
            self._contexts.append(stack.pop_all())
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.pop().__exit__(*error)

    @staticmethod
    def materialize(module: nn.Module, verbose: bool = False) -> nn.Module:
        """Compute the recorded parameters and buffers of a module in place, and return the module."""
        count = materialize([*module.parameters(), *module.buffers()])
        if verbose:
            get_dist_logger().info(f"LazyInitContext: {count} tensors have been initialised", ranks=[0])
        return module
