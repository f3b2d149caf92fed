"""The state of an optimizer as parts of whole tensors, one per parameter and kind of state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops._host import HOST
from .place import PADDING, Entries, Place, boxes_of_stretch, places_of, whole_place
from .whole import Group, Part

# What of a parameter group belongs to one process.
_OWN = ("params", "param_names")


def groups_of(optimizer: Any) -> list[Group]:
    """The options of its parameter groups, and the model's parameters in them: not masters, if amp has made such."""
    if optimizer is None:
        return []
    saved = optimizer.param_groups if _is_divided(optimizer) else optimizer.state_dict()["param_groups"]
    options = [{name: value for name, value in group.items() if name not in _OWN} for group in saved]
    return list(zip(options, _params(optimizer), strict=True))


def _is_divided(optimizer: Any) -> bool:
    """Whether replicas share the state among them (ZeRO)."""
    return hasattr(optimizer, "_own_state")


def _params(optimizer: Any) -> list[list[Tensor]]:
    stash = getattr(optimizer, "_amp_stash", None)
    pairs = () if stash is None else zip(stash.all_fp32_from_fp16_params, stash.all_fp16_params, strict=True)
    of_model: dict[Tensor, Tensor] = dict(pairs)
    return [[of_model.get(param, param) for param in group["params"]] for group in optimizer.param_groups]


def add_state(entries: Entries, optimizer: Any, parts: Sequence[Part]) -> int | None:
    """Adds what this rank is to save; the count of steps, if the optimizer has one for all parameters."""
    names = {id(part.variable): part.name for part in parts if part.writes}
    if _is_divided(optimizer):
        stretches, step = optimizer._own_state()
        for param, kind, start, values in stretches:
            if id(param) in names:
                _add_stretch(entries, f"optimizer.{kind}.{names[id(param)]}", param, start, values)
        return step
    state_dict = optimizer.state_dict()
    counted = all("step" in group for group in state_dict["param_groups"])
    for param, index, name in _named(optimizer, state_dict, names):
        for kind, value in state_dict["state"].get(index, {}).items():
            if counted and kind == "step":
                continue
            key = f"optimizer.{kind}.{name}"
            if isinstance(value, Tensor):
                entries.add(key, value, _places(key, param, value.shape))
            else:
                entries.state[key] = (value,)
    return None


def want_state(entries: Entries, optimizer: Any, parts: Sequence[Part], values: Any) -> Callable[[], None]:
    """Adds what this rank is to load; to be called when it is there, the result gives it to the optimizer.

    `values` is what was saved of the optimizer but tensors.
    """
    if optimizer is None:
        return lambda: None
    names = {id(part.variable): part.name for part in parts}
    if _is_divided(optimizer):
        found = []
        for param, kind, start, now in optimizer._own_state()[0]:
            found.append((param, kind, start, torch.zeros_like(now)))
            _add_stretch(entries, f"optimizer.{kind}.{names[id(param)]}", param, start, found[-1][-1])
        return lambda: optimizer._load_own_state(found, values["groups"], values["step"])
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
        for kind, there in saved.get(name, {}).items():
            key = f"optimizer.{kind}.{name}"
            if not hasattr(there, "size"):
                entries.state[key] = None
                plain.append((state[index], kind, key))
                continue
            shape = param.shape if tuple(there.size) == places_of(param)[""].size else there.size
            # Counts of steps are on the host, or the optimizer moves them.
            device = param.device if len(shape) else HOST
            state[index][kind] = torch.zeros(shape, dtype=there.properties.dtype, device=device)
            entries.add(key, state[index][kind], _places(key, param, shape))

    def load() -> None:
        for of_param, kind, key in plain:
            of_param[kind] = entries.state[key][0]
        groups = []
        for options, now, params in zip(values["groups"], current["param_groups"], _params(optimizer), strict=True):
            own = {name: now[name] for name in _OWN if name in now}
            groups.append({**{name: _moved(value, params) for name, value in options.items()}, **own})
        optimizer.load_state_dict({"state": {key: each for key, each in state.items() if each}, "param_groups": groups})

    return load


def _moved(value: Any, params: list[Tensor]) -> Any:
    """An option of a group; a tensor, which a `capturable` optimizer has, where the group's parameters are."""
    return value.to(params[0].device) if isinstance(value, Tensor) and params else value


def _named(optimizer: Any, state_dict: dict[str, Any], names: dict[int, str]) -> Iterator[tuple[Tensor, Any, str]]:
    """The model's parameters that have a name, what a state dict calls them, and the name."""
    for params, group in zip(_params(optimizer), state_dict["param_groups"], strict=True):
        for param, index in zip(params, group["params"], strict=True):
            if id(param) in names:
                yield param, index, names[id(param)]


def _places(key: str, param: Tensor, shape: Sequence[int]) -> dict[str, Place]:
    """The places of state that has the shape of its parameter, or another shape and is the same on all ranks."""
    if tuple(shape) == tuple(param.shape):
        return places_of(param)
    if len(shape) and getattr(param, "tensor_model_parallel", False):
        raise ValueError(f"{key} has shape {tuple(shape)}, and its parameter {tuple(param.shape)}: it cannot be split")
    return {"": whole_place(shape)}


def _add_stretch(entries: Entries, key: str, param: Tensor, start: int, values: Tensor) -> None:
    if not param.is_contiguous():
        raise ValueError(f"the parameter of {key} is not contiguous, so that parts of its memory are no boxes of it")
    places, at = places_of(param), 0
    for first, sizes in boxes_of_stretch(param.shape, start, start + len(values)):
        count = math.prod(sizes)
        entries.add(key, values[at : at + count].view(sizes), places, first)
        at += count
