"""Optimizers whose state is divided among processes (ZeRO), made from ordinary ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..contrib.optimizers import DistributedFusedAdam
from ..ops.multi_tensor import Lists, rules
from ..optimizers import FusedAdam, FusedSGD

BYTES_OF_A_GRADIENT = 4


class DividedSGD(DistributedFusedAdam):
    """SGD with momentum on the engine of DistributedFusedAdam."""

    def _state_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",)

    def _update(
        self, group: dict[str, Any], lists: Lists, step: Any, noop: Tensor | None, scale: Tensor | None
    ) -> None:
        first = (step == 1).to(torch.float64) if isinstance(step, Tensor) else step == 1
        options = {name: group[name] for name in ("lr", "momentum", "dampening", "weight_decay")}
        flags = rules.sgd_flags(group["nesterov"], False, [])
        lists.apply(rules.SGD, {**options, "first": first}, flags, noop=noop, grad_scale=scale)


def zero_optimizer(optimizer: torch.optim.Optimizer, **options: Any) -> DistributedFusedAdam:
    """An optimizer with the same algorithm, parameter groups and state as this one, divided among processes.

    The groups are the same dicts: schedulers that change those of one change those of the other.
    """
    groups = optimizer.param_groups
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW, FusedAdam)):
        kind: type[DistributedFusedAdam] = DistributedFusedAdam
        decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(getattr(optimizer, "adam_w_mode", False))
        options.update(adam_w_mode=decoupled or bool(groups[0].get("decoupled_weight_decay", False)))
        options.update(amsgrad=bool(groups[0].get("amsgrad", False)))
    elif isinstance(optimizer, (torch.optim.SGD, FusedSGD)):
        kind = DividedSGD
    else:
        raise ValueError(
            f"the optimizer is a {type(optimizer).__name__}, whose state cannot be divided; use Adam, AdamW or SGD of "
            "torch.optim, or FusedAdam or FusedSGD of apex.optimizers"
        )
    if any(group.get("maximize") for group in groups):
        raise ValueError("maximize=True is not there for ZeRO: give the negative of the loss")
    saved = optimizer.state_dict() if optimizer.state else None
    # The engine warns of buckets that are larger than what is in them.
    size = sum(param.numel() for group in groups for param in group["params"]) * BYTES_OF_A_GRADIENT / 2**20
    options["bucket_cap_mb"] = max(min(options.get("bucket_cap_mb", size), size), 2.0**-20)
    divided = kind([dict(group) for group in groups], **options)
    for group, theirs in zip(groups, divided.param_groups, strict=True):
        for name, value in theirs.items():
            group.setdefault(name, value)
    divided.param_groups = groups
    if saved is not None:
        load_plain_state(divided, saved)
    return divided


def load_plain_state(divided: DistributedFusedAdam, saved: dict[str, Any]) -> None:
    """Loads the state dict of an optimizer that has no state of some parameters, or None where SGD has no momentum."""
    names = divided._state_names()
    params = dict(enumerate(divided.parameters()))
    state = {}
    for key, param in params.items():
        found = saved["state"].get(key, {})
        kept = {name: value for name, value in found.items() if value is not None}
        state[key] = {**{name: torch.zeros_like(param) for name in names}, **kept}
    divided.load_state_dict({**saved, "state": state})
