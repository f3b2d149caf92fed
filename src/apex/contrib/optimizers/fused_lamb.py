"""FusedLAMB without NVLAMB."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ... import optimizers


class FusedLAMB(optimizers.FusedLAMB):
    """`apex.optimizers.FusedLAMB` with upstream's arguments of this place."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        *,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        capturable: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adam_w_mode,
            grad_averaging,
            set_grad_none,
            max_grad_norm,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
            capturable=capturable,
        )

    @property
    def multi_tensor_lamb(self) -> Callable[..., Any]:
        """`fused_lamb_cuda.lamb`, for subclasses written for the original."""
        return importlib.import_module("fused_lamb_cuda").lamb
