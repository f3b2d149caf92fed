"""NpuFusedAdam: Adam on combined parameters and gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._base import Skip
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
        *,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        capturable: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            adam_w_mode=self._decoupled,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
            capturable=capturable,
        )

    def _update(self, group: dict[str, Any], bucket: Bucket, step: Any, skip: Skip, seed: int | None) -> None:
        super()._update(group, bucket, self._step_of(bucket, step), skip, seed)
