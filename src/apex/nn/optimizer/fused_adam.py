"""FusedAdam with Colossal-AI's arguments; FusedLAMB and FusedSGD are apex's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ... import optimizers
from ...optimizers import FusedLAMB, FusedSGD
from ...optimizers._base import run_closure

__all__ = ["FusedAdam", "FusedLAMB", "FusedSGD"]


class FusedAdam(optimizers.FusedAdam):
    """`apex.optimizers.FusedAdam` whose decoupled weight decay is called `adamw_mode`."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad, set_grad_none)
        self.adamw_mode = self.adam_w_mode

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, div_scale: float = -1, **scaler: Any
    ) -> Any:
        """Run the closure, divide all gradients by `div_scale` if that is positive, and perform one step."""
        loss = run_closure(closure)
        if div_scale > 0:
            gradients = [
                param.grad for group in self.param_groups for param in group["params"] if param.grad is not None
            ]
            if gradients:
                torch._foreach_div_(gradients, div_scale)
        super().step(**scaler)
        return loss
