"""NpuFusedAdam and NpuFusedAdamW: Adam and AdamW on combined parameters and gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ._base import LossScaling, Options
from ._buckets import Bucket
from ._combined import NpuFusedOptimizerBase
from ._parameter_steps import ParameterSteps
from .fused_adam import FusedAdam


class NpuFusedAdam(NpuFusedOptimizerBase, ParameterSteps, FusedAdam):
    """The numbers of `torch.optim.Adam`, with which state dicts are interchangeable: decay is added to the gradient."""

    _decoupled = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            adam_w_mode=self._decoupled,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            **options,
        )

    def _update(self, group: dict[str, Any], bucket: Bucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        super()._update(group, bucket, self._step_of(bucket, step), scaling, seed)


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
