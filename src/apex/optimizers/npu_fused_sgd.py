"""NpuFusedSGD: stochastic gradient descent on combined parameters and gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import required

from ._combined import NpuFusedOptimizerBase
from .fused_sgd import FusedSGD


class NpuFusedSGD(NpuFusedOptimizerBase, FusedSGD):
    """The numbers of `torch.optim.SGD`, with which state dicts are interchangeable."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = required,  # type: ignore[assignment]
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        capturable: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
            capturable=capturable,
        )
