"""State dicts of fused optimizers: exact, and interchangeable with state dicts of `torch.optim`.

PyTorch's optimizers count steps per parameter, in a tensor; fused ones count per group, in `group["step"]`. Both counts
are saved. PyTorch casts loaded state to the parameter's dtype, which would round the float32 state of half-precision
parameters; fused optimizers keep the saved dtype.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..ops._host import HOST
from ._buckets import MASTER, local
from ._checks import HYPERPARAMETERS, check_step
from ._foreign_formats import decoded_foreign
from ._formats import check_codes, decoded_state, saved_in_any_format

logger = logging.getLogger("apex.optimizers")


def saved_state(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Add each parameter's step count for PyTorch's optimizers; copied, so that later steps do not change it."""
    state = dict(state_dict["state"])
    groups = [
        {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
        for group in state_dict["param_groups"]
    ]
    for group in groups:
        step = group.get("step")
        if step is None:
            continue
        for param in group["params"]:
            if param in state:
                device = step.device if isinstance(step, Tensor) else HOST
                count = torch.as_tensor(step, dtype=torch.float32, device=device).reshape(()).clone()
                state[param] = {**state[param], "step": count}
    return {**state_dict, "state": state, "param_groups": groups}


def check_saved(optimizer: Any, state_dict: Any) -> None:
    """Raise an error if a state dict does not fit the optimizer, before anything is loaded."""
    name = type(optimizer).__name__
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        keys = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(
            f"{name} loads a dict with 'state' and 'param_groups', as its state_dict() returns, not {keys}"
        )
    groups = state_dict["param_groups"]
    for number, saved in enumerate(groups):
        if not isinstance(saved, Mapping) or "params" not in saved:
            raise ValueError(f"param_groups[{number}] of the state dict is {saved!r}, not a group with 'params'")
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in optimizer.param_groups]:
        return  # PyTorch raises the error
    for number, (group, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        source = f"param_groups[{number}] of the state dict"
        missing = {option for option in optimizer.defaults if option in HYPERPARAMETERS and option not in saved}
        foreign = HYPERPARAMETERS.intersection(saved).difference(optimizer.defaults, group, _OF_ADAGRAD)
        if missing or foreign:
            has = " and ".join(
                f"{word} {sorted(names)}" for word, names in (("lacks", missing), ("has", foreign)) if names
            )
            raise ValueError(f"{source} is that of another optimizer than {name}: it {has}")
        options = {**optimizer.defaults, **group, **saved}
        optimizer._check_options(options)
        if "step" in saved:
            check_step(f"step in {source}", saved["step"])
        names = tuple(optimizer._state_names(options))
        for param, key in zip(group["params"], saved["params"], strict=True):
            state = state_dict["state"].get(key)
            if state:
                _check_param_state(optimizer, param, f"the state of parameter {key}", state, names, "step" in saved)


# Options that torch.optim.Adagrad saves and FusedAdagrad's arguments lack; FusedAdagrad follows them.
_OF_ADAGRAD = ("lr_decay", "initial_accumulator_value")


def _check_param_state(
    optimizer: Any, param: Tensor, source: str, state: Any, names: Sequence[str], counted: bool
) -> None:
    """Raise an error if the saved state of a parameter does not fit; `source` names it in messages."""
    name = type(optimizer).__name__
    if not isinstance(state, Mapping):
        raise ValueError(f"{source} is {state!r}, not a dict of tensors")
    missing = [key for key in names if not saved_in_any_format(key, state) and key not in optimizer._may_lack]
    if optimizer._counts_steps and not counted and "step" not in state:
        missing.append("step")
    if missing:
        raise ValueError(f"{source} has {sorted(state)}, not {', '.join(missing)}: {name} cannot go on from it")
    if "step" in state:
        check_step(f"step in {source}", state["step"])
    for key, value in state.items():
        placements = [getattr(tensor, "placements", "whole") for tensor in (value, param)]
        fits = placements[0] == placements[1] or key.partition("::")[0] not in (*names, MASTER)
        if not fits and isinstance(value, Tensor) and value.shape == param.shape:
            raise ValueError(
                f"{key} in {source} is distributed as {placements[0]}, the parameter as {placements[1]}; "
                "torch.distributed.checkpoint loads state for other shards"
            )
    check_codes(optimizer, param, source, state, names)
    for key in (*names, MASTER):
        value = state.get(key)
        if key not in state or (value is None and key in optimizer._may_lack):
            continue
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape != param.shape:
            actual = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{key} in {source} is {actual}; a float tensor of shape {tuple(param.shape)} is expected")


# Entries of a group that steps make. A state dict without one was saved before the first step.
_PROGRESS = ("step", "rounding_count", "mu_product", "lr_max", "weight_sum")


# Attributes with the hooks that `load_state_dict` of PyTorch's optimizers calls before and after.
_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


def saved_with_hooks(optimizer: Any, save: Callable[[], Any]) -> Any:
    """Return the state dict that `save` makes, after the hooks that users registered; for methods of their own."""
    for hook in vars(optimizer)["_optimizer_state_dict_pre_hooks"].values():
        hook(optimizer)
    saved = save()
    if saved is None:  # another process has it
        return None
    for hook in vars(optimizer)["_optimizer_state_dict_post_hooks"].values():
        changed = hook(optimizer, saved)
        saved = saved if changed is None else changed
    return saved


def load_with_hooks(optimizer: Any, state_dict: Any, load: Callable[[Any], None]) -> None:
    """Load by `load`, between the hooks that users registered.

    PyTorch's own method, which `load` calls, would run them after the checks and before values are restored, so that
    their changes would be lost.
    """
    before, after = (vars(optimizer)[name] for name in _HOOKS)
    state_dict = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict
    for hook in before.values():
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    vars(optimizer).update((name, OrderedDict()) for name in _HOOKS)
    try:
        load(state_dict)
    finally:
        vars(optimizer).update(zip(_HOOKS, (before, after), strict=True))
    for hook in after.values():
        hook(optimizer)


def load_state(optimizer: Any, state_dict: dict[str, Any], load: Callable[[dict[str, Any]], None]) -> None:
    """Load by PyTorch's own method, then restore the values that it rounded or dropped."""
    state_dict = decoded_foreign(_from_distributed(optimizer, state_dict))
    check_saved(optimizer, state_dict)
    state_dict = decoded_state(optimizer, state_dict, everything=not optimizer._encodable)
    if any(group.get("maximize") for group in state_dict["param_groups"]):
        raise ValueError("the state dict has maximize=True; fused optimizers only minimise: negate the loss")
    before = [dict(group) for group in optimizer.param_groups]
    counts = step_counts(state_dict)
    # PyTorch would copy all state to the device, also state that is kept elsewhere.
    load(state_dict if optimizer._place_state is None else {**state_dict, "state": {}})
    for group, previous, count in zip(optimizer.param_groups, before, counts, strict=True):
        for option, value in {**optimizer.defaults, **previous}.items():
            if option not in _PROGRESS:
                group.setdefault(option, value)  # options that PyTorch's optimizers do not have
        if count is not None:
            group["step"] = count
        for name in _PROGRESS:
            if isinstance(group.get(name), Tensor) and group["params"]:
                # A graph cannot count in host memory, and the state dict may have been loaded to the host.
                group[name] = group[name].to(group["params"][0].device, copy=True)
    saved_groups = state_dict["param_groups"]
    saved = chain.from_iterable(group["params"] for group in saved_groups)
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for index, param in zip(saved, params, strict=True):
        if index not in state_dict["state"]:
            continue
        state = optimizer.state[param]
        state.pop("step", None)
        for name, value in state_dict["state"][index].items():
            if name != "step":
                state[name] = _restored(value, param)
        _take_master(state, param)
        if optimizer._place_state is not None:
            optimizer._place_state(state, param)
    optimizer._rename_loaded_state()


@torch.no_grad()
def _take_master(state: dict[str, Any], param: Tensor) -> None:
    """Drop the master of a float32 parameter, which has these bits itself.

    A parameter that is the master's rounding, loaded from a half-precision model, becomes the master.
    """
    if param.dtype == torch.float32 and isinstance(state.get(MASTER), Tensor):
        master = state.pop(MASTER).to(torch.float32)
        if any(bool((param == master.to(dtype)).all()) for dtype in (torch.bfloat16, torch.float16)):
            param.copy_(master)


def _from_distributed(optimizer: Any, state_dict: Any) -> Any:
    """Convert a state dict of DistributedFusedAdam to FusedAdam's format.

    Master weights get another name. Earlier versions saved one step count, which becomes that of every group.
    """
    if not isinstance(state_dict, Mapping) or state_dict.get("format") is None:
        return state_dict
    if "state" not in state_dict or "step" not in state_dict["state"]:
        raise ValueError(
            f"{type(optimizer).__name__} does not load format {state_dict['format']} of DistributedFusedAdam's state "
            "dicts; state_dict(state_dict_format=2) makes one that it does"
        )
    state = {key: dict(value) for key, value in state_dict["state"].items() if key != "step"}
    saved_groups = [{"step": state_dict["state"]["step"], **group} for group in state_dict["param_groups"]]
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for key, param in zip(chain.from_iterable(group["params"] for group in saved_groups), params, strict=False):
        master = state.get(key, {}).pop("param", None)
        if master is not None and optimizer.master_weights and param.dtype.itemsize < master.dtype.itemsize:
            state[key][MASTER] = master
    return {"state": state, "param_groups": saved_groups}


def _restored(value: Any, param: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    if local(value) is not value:
        return value.clone()
    moved = value.detach().to(param.device, copy=True)
    return moved if moved.shape != param.shape else torch.empty_like(param, dtype=value.dtype).copy_(moved)


def step_counts(state_dict: dict[str, Any]) -> list[Any]:
    """Return each group's step count: the group's own, or else its parameters'.

    A group counts less than its parameters if torch.distributed.checkpoint loaded state of an optimizer of PyTorch,
    whose groups have no count: the group's is that of the optimizer before it was loaded.
    """
    counts: list[Any] = []
    for group in state_dict["param_groups"]:
        states = (state_dict["state"].get(param, {}) for param in group["params"])
        steps = {int(state["step"]) for state in states if "step" in state}
        if "step" in group and int(group["step"]) >= max(steps, default=0):
            step = group["step"]
            counts.append(step.clone() if isinstance(step, Tensor) else step)
            continue
        if len(steps) > 1:
            logger.warning("parameters of one group were stepped %s times; the group goes on from the largest", steps)
        counts.append(max(steps) if steps else None)
    return counts
