"""Optimizer state as parts of whole tensors, one tensor per parameter and kind of state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops._host import HOST
from .model_parts import Group, Part
from .shards import PADDING, Entries, ShardLocation, boxes_of_range, replicated_location, shard_locations

# Entries of a parameter group that belong to one process.
_OWN = ("params", "param_names")


def parameter_groups(optimizer: Any) -> list[Group]:
    """Return each parameter group's options and its model parameters (not the master weights that amp made)."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer must be an optimizer or a list of optimizers, got {type(optimizer).__name__}")
    saved = optimizer._counted_groups() if _is_divided(optimizer) else optimizer.state_dict()["param_groups"]
    options = [{name: value for name, value in group.items() if name not in _OWN} for group in saved]
    return list(zip(options, _params(optimizer), strict=True))


def _is_divided(optimizer: Any) -> bool:
    """Return True if replicas divide the optimizer state among them (ZeRO)."""
    return hasattr(optimizer, "_own_state")


def _params(optimizer: Any) -> list[list[Tensor]]:
    stash = getattr(optimizer, "_amp_stash", None)
    pairs = () if stash is None else zip(stash.all_fp32_from_fp16_params, stash.all_fp16_params, strict=True)
    of_model: dict[Tensor, Tensor] = dict(pairs)
    return [[of_model.get(param, param) for param in group["params"]] for group in optimizer.param_groups]


def add_state(entries: Entries, optimizer: Any, parts: Sequence[Part]) -> int | None:
    """Add the state that this rank saves; return the step count if the optimizer has one for all parameters."""
    names = {id(part.variable): part.name for part in parts if part.writes}
    if _is_divided(optimizer):
        ranges, step = optimizer._own_state()
        for param, kind, start, values in ranges:
            if id(param) in names:
                _add_range(entries, f"optimizer.{kind}.{names[id(param)]}", param, start, values)
        return step
    state_dict = optimizer.state_dict()
    counts_per_group = all("step" in group for group in state_dict["param_groups"])
    for param, index, name in _named(optimizer, state_dict, names):
        for kind, value in state_dict["state"].get(index, {}).items():
            if counts_per_group and kind == "step":
                continue
            key = f"optimizer.{kind}.{name}"
            if isinstance(value, Tensor):
                entries.add(key, value, _locations(key, param, value.shape))
            else:
                entries.state[key] = (value,)
    return None


def request_state(entries: Entries, optimizer: Any, parts: Sequence[Part], values: Any) -> Callable[[], None]:
    """Add the state that this rank loads, and return a function that passes it to the optimizer once it is read.

    `values` holds the saved values of the optimizer that are not tensors.
    """
    names = {id(part.variable): part.name for part in parts}
    if _is_divided(optimizer):
        slices = []
        for param, kind, start, group in optimizer._own_state()[0]:
            slices.append((param, kind, start, torch.zeros_like(group)))
            _add_range(entries, f"optimizer.{kind}.{names[id(param)]}", param, start, slices[-1][-1])
        return lambda: optimizer._load_own_state(slices, values["groups"], values["step"])
    saved: dict[str, dict[str, Any]] = {}
    for key, value in (entries.saved or {}).items():
        if key.startswith("optimizer.") and not key.endswith(PADDING):
            _, kind, name = key.split(".", 2)
            saved.setdefault(name, {})[kind] = value
    current = optimizer.state_dict()
    state: dict[Any, dict[str, Any]] = {}
    plain: list[tuple[dict[str, Any], str, str]] = []
    for param, index, name in _named(optimizer, current, names):
        state[index] = {}
        for kind, metadata in saved.get(name, {}).items():
            key = f"optimizer.{kind}.{name}"
            if not hasattr(metadata, "size"):
                entries.state[key] = None
                plain.append((state[index], kind, key))
                continue
            shape = param.shape if tuple(metadata.size) == shard_locations(param)[""].size else metadata.size
            # Step counts are on the host; the optimizer moves them if needed.
            device = param.device if len(shape) else HOST
            state[index][kind] = torch.zeros(shape, dtype=metadata.properties.dtype, device=device)
            entries.add(key, state[index][kind], _locations(key, param, shape))

    def load() -> None:
        for param_state, kind, key in plain:
            param_state[kind] = entries.state[key][0]
        groups = []
        for options, group, params in zip(values["groups"], current["param_groups"], _params(optimizer), strict=True):
            own = {name: group[name] for name in _OWN if name in group}
            groups.append({**{name: _moved(value, params) for name, value in options.items()}, **own})
        loaded = {index: param_state for index, param_state in state.items() if param_state}
        optimizer.load_state_dict({"state": loaded, "param_groups": groups})

    return load


def _moved(value: Any, params: list[Tensor]) -> Any:
    """Return an option of a group; move a tensor, which a `capturable` optimizer has, to the parameters' device."""
    return value.to(params[0].device) if isinstance(value, Tensor) and params else value


def _named(optimizer: Any, state_dict: dict[str, Any], names: dict[int, str]) -> Iterator[tuple[Tensor, Any, str]]:
    """Yield each named parameter of the model, its index in the state dict, and its name."""
    for params, group in zip(_params(optimizer), state_dict["param_groups"], strict=True):
        for param, index in zip(params, group["params"], strict=True):
            if id(param) in names:
                yield param, index, names[id(param)]


def _locations(key: str, param: Tensor, shape: Sequence[int]) -> dict[str, ShardLocation]:
    """Return the locations of a state tensor: its parameter's if the shapes are equal, otherwise replicated."""
    if tuple(shape) == tuple(param.shape):
        return shard_locations(param)
    if len(shape) and getattr(param, "tensor_model_parallel", False):
        raise ValueError(f"{key} has shape {tuple(shape)}, and its parameter {tuple(param.shape)}: it cannot be split")
    return {"": replicated_location(shape)}


def _add_range(entries: Entries, key: str, param: Tensor, start: int, values: Tensor) -> None:
    if not param.is_contiguous():
        raise ValueError(f"the parameter of {key} is not contiguous, so that parts of its memory are no boxes of it")
    locations, position = shard_locations(param), 0
    for first, sizes in boxes_of_range(param.shape, start, start + len(values)):
        count = math.prod(sizes)
        entries.add(key, values[position : position + count].view(sizes), locations, first)
        position += count
