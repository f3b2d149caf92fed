"""FusedScheduleFreeAdamW: AdamW that needs no learning rate schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops import _graph_numbers
from ..ops._graph_numbers import Number, lifted
from ..ops.multi_tensor import rules
from ._base import FusedOptimizer, LossScaling, Options, adam_hyperparameters, state_dtype
from ._buckets import MASTER, Group, UpdateBucket, local


class Weighted(NamedTuple):
    """The step count, the learning rate after its warm-up, and the weight of this step in the average of z."""

    step: Any
    lr: Any
    share: Any


class FusedScheduleFreeAdamW(FusedOptimizer):
    """Schedule-Free AdamW (https://arxiv.org/abs/2405.15682).

    Parameters are y, where gradients are taken, during training, and the average x for evaluation: call `eval()` before
    evaluating or saving the model, and `train()` before the next step.

        d = g / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay y
        y <- lerp(y, z, c) + lr (beta1 (1 - c) - 1) d
        z <- z - lr d

    c is this step's share of the sum of t^r times the largest learning rate so far to the power of
    `weight_lr_power`. The learning rate grows linearly in the first `warmup_steps`. `FusedOptimizer` describes the
    keyword options.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.0025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        *,
        cautious_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults: dict[str, Any] = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        defaults |= dict(warmup_steps=warmup_steps, r=r, weight_lr_power=weight_lr_power, train_mode=True)
        super().__init__(params, defaults | {"cautious_weight_decay": cautious_weight_decay}, **options)

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        if options["betas"][0] <= 0:
            raise ValueError(f"betas[0]={options['betas'][0]} is not above 0, and eval() divides by it")
        if not isinstance(options["warmup_steps"], int) or options["warmup_steps"] < 0:
            raise ValueError(f"warmup_steps={options['warmup_steps']!r} is not a number of steps")

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return ("z", "exp_avg_sq")

    def _initial_state(self, name: str, param: Tensor, group: dict[str, Any]) -> Tensor:
        if name == "z":
            return param.detach().to(state_dtype(param), copy=True)
        return super()._initial_state(name, param, group)

    def _before_step(self) -> None:
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError("FusedScheduleFreeAdamW.step() needs train() after eval()")

    def _next_step(self, index: int, group: dict[str, Any], device: torch.device, scaling: LossScaling) -> Any:
        """Count a step and its weight; a skipped step adds none."""
        step = super()._next_step(index, group, device, scaling)
        capture = _graph_numbers.current
        numbers = group if capture is None else capture.group(self, index)
        lr, power, r = numbers["lr"], group["weight_lr_power"], group["r"]
        on_device = isinstance(step, Tensor) or capture is not None or isinstance(lr, Tensor)
        if warmup := group["warmup_steps"]:
            lr = lr * (
                torch.clamp(step / warmup, max=1.0)
                if isinstance(step, Tensor)
                else lifted(lambda count: min(count / warmup, 1.0), step)
            )
        if not on_device and not isinstance(group.get("weight_sum"), Tensor):
            largest = group["lr_max"] = max(lr, group.get("lr_max", 0.0))
            weight = step**r * largest**power
            group["weight_sum"] = group.get("weight_sum", 0.0) + weight
            return Weighted(step, lr, weight / group["weight_sum"] if group["weight_sum"] else 0.0)
        largest, total = (_on(group.get(name, 0.0), device) for name in ("lr_max", "weight_sum"))
        new_largest = torch.maximum(largest, _on(lr, device))
        weight = _on(step, device) ** r * new_largest**power
        new_total = total + weight
        share = torch.where(new_total > 0, weight / new_total, 0.0)
        kept = None if scaling.found_inf is None else scaling.found_inf.to(device).reshape(()) != 0
        for name, old, new in (("lr_max", largest, new_largest), ("weight_sum", total, new_total)):
            value = new if kept is None else torch.where(kept, old, new)
            if isinstance(group.get(name), Tensor):
                group[name].copy_(value)
            else:
                group[name] = value.clone()
        return Weighted(step, lr, share)

    def _update(
        self, group: Group, bucket: UpdateBucket, step: Weighted, scaling: LossScaling, seed: int | None
    ) -> None:
        hyper = adam_hyperparameters({**group, "lr": step.lr}, step.step, share=step.share)
        del hyper["bias_correction"]
        flags = (bool(group["cautious_weight_decay"]),)
        bucket.lists.apply(rules.SCHEDULE_FREE, hyper, flags, seed=seed, **scaling.arguments)

    def eval(self) -> None:
        """Move parameters to the average x, for evaluation and for saving the model."""
        self._move(False)

    def train(self) -> None:
        """Move parameters back to y, where gradients are taken."""
        self._move(True)

    @torch.no_grad()
    def _move(self, to_train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] == to_train:
                continue
            beta1 = group["betas"][0]
            for param in group["params"]:
                state = self.state.get(param)
                if not state or "z" not in state:
                    continue
                values = local(state.get(MASTER, param))
                z = local(state["z"]).to(values.dtype)
                values.lerp_(z, 1 - beta1 if to_train else 1 - 1 / beta1)
                if MASTER in state:
                    local(param).copy_(values)
                if param in self._model_params:  # the parameter is a master of apex.amp
                    local(self._model_params[param]).copy_(values)
            group["train_mode"] = to_train


def _on(value: Any, device: torch.device) -> Tensor:
    """Return a number as a float64 tensor on a device, without waiting for the device."""
    if isinstance(value, Number):
        return value.on(device)
    if isinstance(value, Tensor) and not value.is_cpu:
        return value.to(device, torch.float64).reshape(())
    return torch.full((), float(value), dtype=torch.float64, device=device)
