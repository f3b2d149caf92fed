"""NpuFusedBertAdam: BERT's Adam and its learning rate schedules, on combined parameters and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required
from typing_extensions import Unpack

from .._distributed.norms import total_norm
from ..ops._graph_numbers import lifted
from ..ops.multi_tensor import rules
from ._base import LossScaling, Options
from ._buckets import Group, UpdateBucket
from ._norms import clipped, global_norm
from ._npu_base import NpuFusedOptimizerBase
from ._parameter_steps import ParameterSteps

# x is the completed share of the training, a number or a tensor; a negative warmup means none.


def _warmed_up(x: Any, warmup: float, later: Any) -> Any:
    """Return x / warmup if x is below warmup, else `later`."""
    if warmup <= 0:
        return later
    if isinstance(x, Tensor):
        return torch.where(x < warmup, x / warmup, later)
    return x / warmup if x < warmup else later


def _at_least_zero(x: Any) -> Any:
    return x.clamp(min=0.0) if isinstance(x, Tensor) else max(x, 0.0)


def warmup_cosine(x: Any, warmup: float = 0.002) -> Any:
    """Return a factor that rises linearly to 1, then falls to 0 along half a cosine."""
    cosine = torch.cos(math.pi * x) if isinstance(x, Tensor) else math.cos(math.pi * x)
    return _warmed_up(x, warmup, 0.5 * (1.0 + cosine))


def warmup_constant(x: Any, warmup: float = 0.002) -> Any:
    """Return a factor that rises linearly to 1, then stays 1."""
    return _warmed_up(x, warmup, torch.ones_like(x) if isinstance(x, Tensor) else 1.0)


def warmup_linear(x: Any, warmup: float = 0.002) -> Any:
    """Return a factor that rises linearly to 1, then falls linearly to 0."""
    return _warmed_up(x, warmup, _at_least_zero((x - 1.0) / (max(warmup, 0.0) - 1.0)))


def warmup_poly(x: Any, warmup: float = 0.002, degree: float = 0.5) -> Any:
    """Return a factor that rises linearly to 1, then is the remaining share of the training to the given power."""
    return _warmed_up(x, warmup, _at_least_zero(1.0 - x) ** degree)


SCHEDULES: dict[str, Callable[..., Any]] = {
    "warmup_cosine": warmup_cosine,
    "warmup_constant": warmup_constant,
    "warmup_linear": warmup_linear,
    "warmup_poly": warmup_poly,
}


class NpuFusedBertAdam(NpuFusedOptimizerBase, ParameterSteps):
    """Adam as used to train BERT: no bias correction, decoupled weight decay, a learning rate schedule.

    The learning rate of a step is `lr` times `schedule` of the number of earlier steps over `t_total`; it is `lr` if
    `t_total` is -1. `warmup` is the share of `t_total` during which it rises, -1 for none. If a group has a
    `max_grad_norm` above 0, its gradients are multiplied by the factor that brings the norm over all groups down to it.
    """

    counts_by_parameter = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = required,  # type: ignore[assignment]
        warmup: float = -1,
        t_total: int = -1,
        schedule: str = "warmup_linear",
        b1: float = 0.9,
        b2: float = 0.99,
        e: float = 1e-6,
        weight_decay: float = 0.01,
        max_grad_norm: float = -1,
        **options: Unpack[Options],
    ) -> None:
        defaults = dict(lr=lr, schedule=schedule, warmup=warmup, t_total=t_total, max_grad_norm=max_grad_norm)
        defaults |= dict(b1=b1, b2=b2, e=e, weight_decay=weight_decay)
        self.global_grad_norm: Tensor | None = None
        super().__init__(params, defaults, **options)

    def _check_options(self, options: dict[str, Any]) -> None:
        """Raise an error if a group's hyperparameters are invalid; -1 means no limit, no warmup or no schedule."""
        warmup, t_total, schedule = options["warmup"], options["t_total"], options["schedule"]
        limits = {"max_grad_norm": options["max_grad_norm"], "warmup": warmup, "t_total": t_total}
        for name, value in limits.items():
            if not isinstance(value, Real) or math.isnan(value):
                raise ValueError(f"{name}={value!r} is not a number")
        super()._check_options({name: value for name, value in options.items() if name not in limits})
        if warmup != -1 and not 0.0 <= warmup < 1.0:
            raise ValueError(f"warmup={warmup} is neither in [0, 1) nor -1")
        if t_total != -1 and t_total <= 0:
            raise ValueError(f"t_total={t_total} is neither above 0 nor -1")
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule={schedule!r} is not known; there are {', '.join(SCHEDULES)}")

    @property
    def _clips(self) -> bool:
        return any(group["max_grad_norm"] > 0 for group in self.param_groups)

    @property
    def _measures(self) -> bool:  # type: ignore[override]
        return self._clips

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return "exp_avg", "exp_avg_sq"

    @torch.no_grad()
    def get_global_grad_norm(self) -> Tensor:
        """Return the norm of all gradients in `.grad`, float32 [1]; also stored as `global_grad_norm`."""
        self.global_grad_norm = total_norm(self._all_gradients(), 2.0).to(torch.float32).reshape(1)
        return self.global_grad_norm

    def _before_update(self, scaling: LossScaling) -> None:
        self.global_grad_norm = global_norm([bucket for _, bucket in self._ready], scaling) if self._clips else None

    def _rate(self, group: dict[str, Any], step: Any) -> Any:
        if group["t_total"] == -1:
            return group["lr"]
        return group["lr"] * lifted(SCHEDULES[group["schedule"]], (step - 1) / group["t_total"], group["warmup"])

    def _update(self, group: Group, bucket: UpdateBucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        if group["max_grad_norm"] > 0:
            scaling = clipped(scaling, self.global_grad_norm, group["max_grad_norm"]).on(bucket.device)
        hyper = {
            "lr": self._rate(group, step),
            "beta1": group["b1"],
            "beta2": group["b2"],
            "eps": group["e"],
            "weight_decay": group["weight_decay"],
            "step": step,
            "bias_correction": False,
        }
        bucket.lists.apply(rules.ADAM, hyper, (True,), **scaling.arguments, seed=seed)
