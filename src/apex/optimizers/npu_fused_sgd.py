"""NpuFusedSGD: stochastic gradient descent on combined parameters and gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import required
from typing_extensions import Unpack

from ._base import Options
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
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, **options)
