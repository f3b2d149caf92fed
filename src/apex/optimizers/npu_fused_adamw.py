"""NpuFusedAdamW: AdamW on combined parameters and gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ._base import Options
from .npu_fused_adam import NpuFusedAdam


class NpuFusedAdamW(NpuFusedAdam):
    """The numbers of `torch.optim.AdamW`, with which state dicts are interchangeable."""

    _decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
