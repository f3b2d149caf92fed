"""Algorithms that `torch.optim` lacks, written out per parameter, to be run in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.optimizers.helpers import Reference


class Lamb(Reference):
    """LAMB with global clipping: https://arxiv.org/abs/1904.00962, algorithm 2, and the options of FusedLAMB."""

    def __init__(self, params: Any, **options: Any) -> None:
        defaults = {
            "lr": 1e-3,
            "bias_correction": True,
            "betas": (0.9, 0.999),
            "eps": 1e-6,
            "weight_decay": 0.01,
            "adam_w_mode": True,
            "grad_averaging": True,
            "use_nvlamb": False,
            "cautious_weight_decay": False,
            "max_grad_norm": 1.0,
        }
        super().__init__(params, **{**defaults, **options})

    def prepare(self, gradients: list[Tensor]) -> None:
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        limit = self.defaults["max_grad_norm"]
        self.divisor = max(1.0, (norm / limit).item()) if limit else 1.0

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        decay = group["weight_decay"]
        g = g / self.divisor
        if not group["adam_w_mode"]:
            g = g + decay * p
        m = state.setdefault("m", torch.zeros_like(p))
        v = state.setdefault("v", torch.zeros_like(p))
        m.mul_(beta1).add_(g, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        v.mul_(beta2).add_(g * g, alpha=1 - beta2)
        corrected_m, corrected_v = m, v
        if group["bias_correction"]:
            corrected_m, corrected_v = m / (1 - beta1 ** group["step"]), v / (1 - beta2 ** group["step"])
        update = corrected_m / (corrected_v.sqrt() + group["eps"])
        if group["adam_w_mode"]:
            decays = (update * p >= 0) | (not group["cautious_weight_decay"])
            update = update + torch.where(decays, decay * p, 0.0)
        ratio = 1.0
        if (group["use_nvlamb"] or decay) and p.norm() > 0 and update.norm() > 0:
            ratio = p.norm() / update.norm()
        p.sub_(group["lr"] * ratio * update)


class NovoGrad(Reference):
    """NovoGrad: https://arxiv.org/abs/1905.11286, with the options of FusedNovoGrad."""

    def __init__(self, params: Any, **options: Any) -> None:
        defaults = {
            "lr": 1e-3,
            "bias_correction": True,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.0,
            "reg_inside_moment": False,
            "grad_averaging": True,
            "norm_type": 2,
            "init_zero": False,
        }
        super().__init__(params, **{**defaults, **options})

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not p.numel():
            return
        beta1, beta2 = group["betas"]
        norm = g.norm() if group["norm_type"] == 2 else g.abs().max()
        if "norm" not in state:
            state["norm"] = torch.zeros_like(norm) if group["init_zero"] else norm
        old = state["norm"]
        if group["norm_type"] == 2:
            state["norm"] = (beta2 * old**2 + (1 - beta2) * norm**2).sqrt()
        else:
            state["norm"] = beta2 * old + (1 - beta2) * norm
        corrections = 1.0, 1.0
        if group["bias_correction"]:
            corrections = 1 - beta1 ** group["step"], (1 - beta2 ** group["step"]) ** 0.5
        deviation = state["norm"] / corrections[1] + group["eps"]
        share = 1 - beta1 if group["grad_averaging"] else 1.0
        m = state.setdefault("m", torch.zeros_like(p))
        if group["reg_inside_moment"]:
            m.mul_(beta1).add_(g / deviation + group["weight_decay"] * p, alpha=share)
            update = m / corrections[0]
        else:
            m.mul_(beta1).add_(g, alpha=share)
            update = m / corrections[0] / deviation + group["weight_decay"] * p
        p.sub_(group["lr"] * update)


class Lars(Reference):
    """LARS: https://arxiv.org/abs/1708.03888, the learning rate inside the momentum, with the options of FusedLARS."""

    def __init__(self, params: Any, **options: Any) -> None:
        defaults = {
            "lr": 0.1,
            "momentum": 0.0,
            "dampening": 0.0,
            "weight_decay": 0.0,
            "trust_coefficient": 0.001,
            "eps": 0.0,
            "nesterov": False,
            "wd_after_momentum": False,
            "is_skipped": False,
        }
        super().__init__(params, **{**defaults, **options})

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        decay, rate = group["weight_decay"], group["lr"]
        length, slope = p.norm(), g.norm()
        if not group["is_skipped"] and length > 0 and slope > 0:
            rate = rate * group["trust_coefficient"] * length / (slope + decay * length + group["eps"])
        after = rate * decay * p if group["wd_after_momentum"] else 0.0
        if not group["wd_after_momentum"]:
            g = g + decay * p
        first = "v" not in state
        v = state.setdefault("v", torch.zeros_like(p))
        dampening = group["dampening"] if group["momentum"] and not first else 0.0
        v.mul_(group["momentum"]).sub_((1 - dampening) * rate * g)
        p.add_((group["momentum"] * v - rate * g if group["nesterov"] else v) - after)
