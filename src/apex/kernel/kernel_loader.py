"""Loaders of Adam's kernels under Colossal-AI's names; nothing is compiled."""

from __future__ import annotations

import importlib
import types
from typing import Any

from torch import Tensor

from .._lazy import lazy_subpackages

__all__ = ["CPUAdamLoader", "FusedOptimizerLoader"]


def _multi_tensor_adam(chunk: int, noop: Tensor, lists: list[list[Tensor]], *options: Any) -> None:
    """Update lists of gradients, parameters and moments; a positive last option divides the gradients first."""
    amp_C = importlib.import_module("amp_C")

    *plain, div_scale = options
    if div_scale > 0:
        lists = [[gradient / div_scale for gradient in lists[0]], *lists[1:]]
    amp_C.multi_tensor_adam(chunk, noop, lists, *plain)


class _CPUAdam:
    """Adam for one flat tensor at a time, with the arguments of the compiled optimizer."""

    def __init__(
        self, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, adamw_mode: bool
    ) -> None:
        self._adamw_mode = adamw_mode

    def step(
        self,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        loss_scale: float,
    ) -> None:
        """Update a parameter and its moments in place; a positive `loss_scale` divides the gradient first."""
        import torch

        noop = torch.zeros(1, dtype=torch.int32, device=param.device)
        lists = [[grad], [param], [exp_avg], [exp_avg_sq]]
        numbers = (lr, beta1, beta2, eps, step, int(self._adamw_mode), int(bias_correction), weight_decay)
        _multi_tensor_adam(2048 * 32, noop, lists, *numbers, loss_scale)


class FusedOptimizerLoader:
    """A loader of amp_C's functions; its `multi_tensor_adam` takes `div_scale` as the last argument."""

    def load(self) -> Any:
        """Return the namespace."""
        amp_C = importlib.import_module("amp_C")

        return types.SimpleNamespace(**{**vars(amp_C), "multi_tensor_adam": _multi_tensor_adam})


class CPUAdamLoader:
    """A loader of a namespace with `CPUAdamOptimizer`."""

    def load(self) -> Any:
        """Return the namespace."""
        return types.SimpleNamespace(CPUAdamOptimizer=_CPUAdam)


__path__: list[str] = []  # as of a package, so that imports of a refused name end in the error with the reason
__getattr__, __dir__ = lazy_subpackages(__name__, ())
