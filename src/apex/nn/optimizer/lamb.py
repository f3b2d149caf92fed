"""Lamb as in Colossal-AI: Adam's update times a trust ratio that has no bounds."""

from __future__ import annotations

from typing import Any

import torch

from ._each import EachParameter

__all__ = ["Lamb"]


class Lamb(EachParameter):
    """LAMB without bounds of norms and ratios, and by default without bias correction.

    `adam=True` sets the trust ratio to 1. `apex.optimizers.FusedLAMB` is a fused LAMB; `apex.optimizers.Lamb` bounds
    the norm of the weights by 10.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
        bias_correction: bool = False,
    ) -> None:
        self.adam = adam
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "bias_correction": bias_correction})

    def _update(self, group: dict[str, Any], param: torch.Tensor) -> None:
        assert param.grad is not None
        state, (beta1, beta2) = self.state[param], group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        state["step"] += 1
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.lerp_(param.grad, 1 - beta1)
        second.mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
        rate = group["lr"]
        if group["bias_correction"]:
            rate = rate * (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
        update = first / second.sqrt().add_(group["eps"])
        if group["weight_decay"]:
            update.add_(param, alpha=group["weight_decay"])
        weight_norm, update_norm = param.norm(), update.norm()
        ratio = torch.where(
            (weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, torch.ones_like(weight_norm)
        )
        # Colossal-AI's own names; the norms stay on the device.
        state.update(weight_norm=weight_norm, adam_norm=update_norm, trust_ratio=ratio)
        param.sub_(update * (rate if self.adam else rate * ratio))
