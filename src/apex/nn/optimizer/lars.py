"""Lars as in Colossal-AI: SGD with a rate for each tensor."""

from __future__ import annotations

from typing import Any

import torch

from ...optimizers._checks import check_options
from ._each import EachParameter

__all__ = ["Lars"]


class Lars(EachParameter):
    """LARS with trust ratios of 0 to 50 and gradients, weight decay included, of -10 to 10.

    `apex.optimizers.FusedLARS` is a fused LARS without such bounds.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0,
        eeta: float = 1e-3,
        weight_decay: float = 0,
        epsilon: float = 0.0,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eeta": eeta, "epsilon": epsilon}
        if not 0 < eeta <= 1:
            raise ValueError(f"eeta={eeta} must be above 0 and at most 1")
        check_options({"eps": epsilon})
        super().__init__(params, {**options, "lars": True})

    def _update(self, group: dict[str, Any], param: torch.Tensor) -> None:
        grad, rate, decay = param.grad, group["lr"], group["weight_decay"]
        assert grad is not None
        if group["lars"]:
            weight_norm, grad_norm = param.norm(), grad.norm()
            ratio = group["eeta"] * weight_norm / (grad_norm + decay * weight_norm + group["epsilon"])
            usable = (weight_norm > 0) & (grad_norm > 0)
            rate = rate * torch.where(usable, ratio, torch.ones_like(ratio)).clamp(0.0, 50.0)
            if decay:
                grad = grad.add(param, alpha=decay)
        grad = grad.clamp(-10.0, 10.0)
        if group["momentum"]:
            state = self.state[param]
            if "momentum_buffer" in state:
                grad = state["momentum_buffer"].mul_(group["momentum"]).add_(grad)
            else:
                state["momentum_buffer"] = grad.clone()
        param.sub_(grad * rate)
