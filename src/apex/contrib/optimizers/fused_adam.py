"""FusedAdam as in upstream's first versions: `step` takes gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops.multi_tensor import rules
from ...ops.multi_tensor.list_updates import number, update
from ...optimizers._base import adam_hyperparameters, state_dtype
from ...optimizers._checks import check_options
from ._explicit_grads import ExplicitGradsOptimizer, Member

_NAMES = ("params", "grads", "exp_avg", "exp_avg_sq", "", "output_params")


class FusedAdam(ExplicitGradsOptimizer):
    """Adam whose epsilon is added before bias correction, and whose weight decay is part of the step.

    p -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * (m / (sqrt(v) + eps) + weight_decay * p), with sqrt(v + eps) if
    `eps_inside_sqrt`. A positive `max_grad_norm` clips the gradients of a group to this norm. `use_mt` has no effect:
    one pass updates all parameters.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        if amsgrad:
            raise RuntimeError("apex.contrib.optimizers.FusedAdam does not support the AMSGrad variant")
        self.eps_mode = 0 if eps_inside_sqrt else 1
        self._amp_scale_adjustment = amp_scale_adjustment
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        defaults["max_grad_norm"] = max_grad_norm
        check_options(defaults)
        super().__init__(params, defaults)

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return "exp_avg", "exp_avg_sq"

    def _from_amp(self, *arguments: Any) -> tuple[Any, ...]:
        stash = getattr(self, "_amp_stash", None)
        if stash is None or not hasattr(stash, "grads"):
            return arguments
        return stash.grads, stash.output_params, stash.scale * self._amp_scale_adjustment, stash.grad_norms

    def _update(self, group: dict[str, Any], members: list[Member], scale: float | Tensor, norm: Any) -> None:
        scale = _combined_scale(scale, norm, group["max_grad_norm"])
        alike: dict[Any, list[Member]] = {}
        for member in members:
            state = self.state[member.param]
            if not state:
                state["step"] = 0
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(member.param, dtype=state_dtype(member.param))
            state["step"] += 1
            alike.setdefault((int(state["step"]), member.output is None), []).append(member)
        for (step, alone), chosen in alike.items():
            params, gradients, outputs = (list(column) for column in zip(*chosen, strict=True))
            moments = ([self.state[param][name] for param in params] for name in ("exp_avg", "exp_avg_sq"))
            hyper = adam_hyperparameters(group, step, scale=scale)
            slots = [params, gradients, *moments, None, None if alone else outputs]
            update(rules.EARLY_ADAM, (slots, _NAMES), hyper, (self.eps_mode == 0,))


def _combined_scale(scale: float | Tensor, norm: float | Tensor | None, largest: float | None) -> float | Tensor:
    """Return the number to divide gradients by, which unscales them and clips their norm to `largest`.

    The result is a tensor on the device if `scale` or `norm` is one.
    """
    scale = number(scale)
    if not largest or largest <= 0 or norm is None:
        return scale
    excess = (number(norm) / scale + 1e-6) / largest
    return scale * (excess.clamp(min=1.0) if isinstance(excess, Tensor) else max(excess, 1.0))
