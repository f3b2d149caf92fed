"""State dicts of fused optimizers: exact, and interchangeable with those of `torch.optim`.

PyTorch's optimizers count steps per parameter, in a tensor; ours count per group, in `group["step"]`. Both are saved.
PyTorch casts loaded state to the parameter's dtype, which would round the float32 state of half-precision parameters;
ours keeps the dtype that was saved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..ops._transfer import HOST
from ._buckets import local

logger = logging.getLogger("apex.optimizers")


def saved_state(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Adds each parameter's step count for PyTorch's optimizers; copies, so that later steps do not change it."""
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


def load_state(optimizer: Any, state_dict: dict[str, Any], load: Callable[[dict[str, Any]], None]) -> None:
    """Loads with PyTorch's own method, then puts back what it would have rounded or dropped."""
    if any(group.get("maximize") for group in state_dict["param_groups"]):
        raise ValueError("the state dict has maximize=True; fused optimizers only minimise: negate the loss")
    before = [dict(group) for group in optimizer.param_groups]
    counts = _step_counts(state_dict)
    load(state_dict)
    for group, previous, count in zip(optimizer.param_groups, before, counts, strict=True):
        for option, value in {**optimizer.defaults, **previous}.items():
            group.setdefault(option, value)  # what PyTorch's optimizers do not have
        if count is not None:
            group["step"] = count
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
    optimizer._rename_loaded_state()


def _restored(value: Any, param: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    if local(value) is not value:
        return value.clone()
    moved = value.detach().to(param.device, copy=True)
    return moved if moved.shape != param.shape else torch.empty_like(param, dtype=value.dtype).copy_(moved)


def _step_counts(state_dict: dict[str, Any]) -> list[Any]:
    """Each group's step count: its own, or that of its parameters."""
    counts: list[Any] = []
    for group in state_dict["param_groups"]:
        if "step" in group:
            step = group["step"]
            counts.append(step.clone() if isinstance(step, Tensor) else step)
            continue
        states = (state_dict["state"].get(param, {}) for param in group["params"])
        steps = {int(state["step"]) for state in states if "step" in state}
        if len(steps) > 1:
            logger.warning("parameters of one group were stepped %s times; the group goes on from the largest", steps)
        counts.append(max(steps) if steps else None)
    return counts
