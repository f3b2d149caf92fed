"""Conversion of torch.optim optimizers to fused ones in place, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from .. import optimizers as fused
from ..optimizers._state_dicts import COUNTS


def _adam(params: Any, group: dict[str, Any], decoupled: bool) -> Optimizer:
    decoupled = group.get("decoupled_weight_decay", decoupled)
    return _counting(fused.FusedAdam(params, adam_w_mode=decoupled, capturable=group.get("capturable", False)))


def _counting(optimizer: Any) -> Optimizer:
    """Make an optimizer count steps for each parameter, as torch.optim does: layers may be frozen at first."""
    optimizer.counts_by_parameter = True
    return optimizer


# By class of torch.optim: a function that makes the fused optimizer from the groups and the first group's options.
RULES: dict[type[Optimizer], Callable[[Any, dict[str, Any]], Optimizer]] = {
    torch.optim.AdamW: lambda params, group: _adam(params, group, True),
    torch.optim.Adam: lambda params, group: _adam(params, group, False),
    torch.optim.SGD: lambda params, group: fused.FusedSGD(params, lr=group["lr"]),
    torch.optim.Adagrad: lambda params, group: fused.FusedAdagrad(params),
    torch.optim.RMSprop: lambda params, group: fused.NpuFusedRMSprop(params),
    torch.optim.Adadelta: lambda params, group: fused.NpuFusedAdadelta(params),
    torch.optim.NAdam: lambda params, group: _counting(
        fused.FusedNAdam(params, capturable=group.get("capturable", False))
    ),
    torch.optim.RAdam: lambda params, group: _counting(
        fused.FusedRAdam(params, capturable=group.get("capturable", False))
    ),
}
if hasattr(torch.optim, "Muon"):  # from PyTorch 2.9 on
    RULES[torch.optim.Muon] = lambda params, group: fused.FusedMuon(params)
# Step counts that state of PyTorch's class does not have.
_COUNTLESS = dict.fromkeys((torch.optim.SGD, getattr(torch.optim, "Muon", None)), frozenset({"step"}))
_REFUSED = ("maximize", "differentiable", "lr_decay")


def reason(optimizer: Optimizer) -> str:
    """Return the reason why an optimizer cannot be fused, "" if it can."""
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
    """Turn a torch.optim optimizer into a fused one. Its groups stay the same objects, because schedulers hold them."""
    original, first, defaults = type(optimizer), optimizer.param_groups[0], optimizer.defaults
    known = {*first}
    source: Any = RULES[original]([{**group} for group in optimizer.param_groups], first)
    source.defaults.update(defaults)  # groups that are added later take them
    source.set_grad_none = True  # a step must not update layers that took no part in it
    _become(optimizer, source)
    own = {*COUNTS, *first} - known
    optimizer._fused_from = original, own, defaults
    optimizer._extra_entries = frozenset(own)
    optimizer._extra_counts = _COUNTLESS.get(original, frozenset())


def restore(optimizer: Any) -> None:
    """Undo `replace` and keep the state of the fused optimizer."""
    original, added, defaults = optimizer._fused_from
    saved = optimizer.state_dict()
    for group in (*saved["param_groups"], *optimizer.param_groups):
        for name in added:
            group.pop(name, None)
    source = original([{**group} for group in optimizer.param_groups])
    source.defaults.update(defaults)
    _become(optimizer, source, saved)


def _become(optimizer: Any, source: Any, saved: dict[str, Any] | None = None) -> None:
    """Give `optimizer` the class and attributes of `source`, which first loads `saved` or the optimizer's state."""
    source.load_state_dict(saved or optimizer.state_dict())
    step_was_wrapped = hasattr(vars(optimizer).pop("step", None), "_wrapped_by_lr_sched")
    own = {name: value for name, value in vars(optimizer).items() if name.endswith("_hooks") or name == "_opt_called"}
    groups = optimizer.param_groups
    for group, new in zip(groups, source.param_groups, strict=True):
        group.update(new)
    attributes = {**vars(source), **own, "param_groups": groups}
    vars(optimizer).clear()
    optimizer.__class__ = type(source)
    vars(optimizer).update(attributes)
    if step_was_wrapped:
        _mark_steps(optimizer)


def _mark_steps(optimizer: Any) -> None:
    """Make `step` record that it was called, which a learning rate scheduler made earlier checks."""

    @functools.wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step
