"""NpuFusedRMSpropTF: RMSprop the way TensorFlow has it, on combined parameters and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ._base import Options, state_dtype
from .npu_fused_rmsprop import NpuFusedRMSprop


class NpuFusedRMSpropTF(NpuFusedRMSprop):
    """RMSprop with TensorFlow's numbers, as timm has it.

    The mean square starts at one instead of zero and epsilon stands below the root, so that first steps are small. With
    `lr_in_momentum` the momentum buffer gathers whole updates, so that a change of the learning rate acts with delay.
    `decoupled_decay` shrinks the parameter by `lr * weight_decay` instead of adding the decay to the gradient.
    """

    _epsilon_below_root = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.9,
        eps: float = 1e-10,
        weight_decay: float = 0,
        momentum: float = 0.0,
        centered: bool = False,
        decoupled_decay: bool = False,
        lr_in_momentum: bool = True,
        **options: Unpack[Options],
    ) -> None:
        self._more_defaults = {"decoupled_decay": decoupled_decay, "lr_in_momentum": lr_in_momentum}
        super().__init__(params, lr, alpha, eps, weight_decay, momentum, centered, **options)

    def _initial_state(self, name: str, param: Tensor, group: dict[str, Any]) -> Tensor:
        if name == "square_avg":
            return torch.ones_like(param, dtype=state_dtype(param), memory_format=torch.preserve_format)
        return super()._initial_state(name, param, group)

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        within = bool(group["lr_in_momentum"]) and group["momentum"] > 0
        return {**super()._hyper(group), "decoupled": bool(group["decoupled_decay"]), "lr_in_momentum": within}
