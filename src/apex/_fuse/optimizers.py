"""Optimizers of torch.optim that become fused ones, in place, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from .. import optimizers as fused


def _adam(params: Any, group: dict[str, Any], decoupled: bool) -> Optimizer:
    decoupled = group.get("decoupled_weight_decay", decoupled)
    return fused.FusedAdam(params, adam_w_mode=decoupled, capturable=group.get("capturable", False))


# How the fused counterpart of a class of torch.optim is made, from groups and the first of them.
RULES: dict[type[Optimizer], Callable[[Any, dict[str, Any]], Optimizer]] = {
    torch.optim.AdamW: lambda params, group: _adam(params, group, True),
    torch.optim.Adam: lambda params, group: _adam(params, group, False),
    torch.optim.SGD: lambda params, group: fused.FusedSGD(params, lr=group["lr"]),
    torch.optim.Adagrad: lambda params, group: fused.FusedAdagrad(params),
    torch.optim.RMSprop: lambda params, group: fused.NpuFusedRMSprop(params),
    torch.optim.Adadelta: lambda params, group: fused.NpuFusedAdadelta(params),
}
_REFUSED = ("maximize", "differentiable", "lr_decay")


def reason(optimizer: Optimizer) -> str:
    """Why an optimizer stays as it is; "" if it does not."""
    if type(optimizer) not in RULES:
        return f"no fused counterpart of {type(optimizer).__name__} is known"
    if hasattr(optimizer, "_amp_stash"):
        return "amp.initialize has prepared it; fuse before that"
    if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return "its step was replaced in this instance"
    if len({group.get("decoupled_weight_decay") for group in optimizer.param_groups}) > 1:
        return "its groups differ in decoupled_weight_decay"
    for group in optimizer.param_groups:
        for name in _REFUSED:
            if group.get(name):
                return f"{name}={group[name]} is not known to the fused optimizer"
        if any(parameter.is_complex() for parameter in group["params"]):
            return "it has complex parameters"
    return ""


def replace(optimizer: Any) -> None:
    """Makes a fused optimizer of one of torch.optim; groups, which schedulers hold, stay the same objects."""
    original, first = type(optimizer), optimizer.param_groups[0]
    known = {*first}
    _become(optimizer, RULES[original]([{**group} for group in optimizer.param_groups], first))
    optimizer._fused_from = original, {"step", *first} - known  # "step" may come later


def restore(optimizer: Any) -> None:
    """Undoes `replace`; the state is what the fused optimizer made of it."""
    original, added = optimizer._fused_from
    saved = optimizer.state_dict()
    for group in (*saved["param_groups"], *optimizer.param_groups):
        for name in added:
            group.pop(name, None)
    _become(optimizer, original([{**group} for group in optimizer.param_groups]), saved)


def _become(optimizer: Any, made: Any, saved: dict[str, Any] | None = None) -> None:
    """Gives `optimizer` the class and the attributes of `made`, which first loads its state (`saved`, where given)."""
    made.load_state_dict(saved or optimizer.state_dict())
    step_was_wrapped = hasattr(vars(optimizer).pop("step", None), "_wrapped_by_lr_sched")
    kept = {name: vars(optimizer)[name] for name in vars(optimizer) if name.endswith("_hooks") or name == "_opt_called"}
    groups = optimizer.param_groups
    for group, new in zip(groups, made.param_groups, strict=True):
        group.update(new)
    attributes = {**vars(made), **kept, "param_groups": groups}
    vars(optimizer).clear()
    optimizer.__class__ = type(made)
    vars(optimizer).update(attributes)
    if step_was_wrapped:
        _mark_steps(optimizer)


def _mark_steps(optimizer: Any) -> None:
    """Has `step` say that it was called, as a learning rate scheduler, made earlier, expects."""

    @functools.wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step
