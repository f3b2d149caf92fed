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


def is_divided(optimizer: Any) -> bool:
    """Whether replicas share the state among them (ZeRO)."""
    return hasattr(optimizer, "_own_state")


def groups_of(optimizer: Any) -> list[Group]:
    """The options of its parameter groups, and the model's parameters in them: not masters, if amp has made such."""
    saved = optimizer.param_groups if is_divided(optimizer) else optimizer.state_dict()["param_groups"]
    options = [{name: value for name, value in group.items() if name not in _OWN} for group in saved]
    return list(zip(options, _params(optimizer), strict=True))


def _params(optimizer: Any) -> list[list[Tensor]]:
    stash = getattr(optimizer, "_amp_stash", None)
    pairs = () if stash is None else zip(stash.all_fp32_from_fp16_params, stash.all_fp16_params, strict=True)
    of_model: dict[Tensor, Tensor] = dict(pairs)
    return [[of_model.get(param, param) for param in group["params"]] for group in optimizer.param_groups]


def add_state(entries: Entries, optimizer: Any, parts: dict[int, Part]) -> int | None:
    """Adds what this rank is to save; the count of steps, if the optimizer has one for all parameters.

    `parts` are those of the model by the parameters' `id`.
    """
    if is_divided(optimizer):
        stretches, step = optimizer._own_state()
        for param, kind, start, values in stretches:
            if parts[id(param)].writes:
                _add_stretch(entries, _key(kind, parts[id(param)].name), param, start, values)
        return step
    state_dict = optimizer.state_dict()
    counted = all("step" in group for group in state_dict["param_groups"])
    for param, index in _indices(optimizer, state_dict):
        part = parts[id(param)]
        for kind, value in state_dict["state"].get(index, {}).items():
            if not part.writes or (counted and kind == "step"):
                continue
            if isinstance(value, Tensor):
                entries.add(_key(kind, part.name), value, _places(_key(kind, part.name), param, value.shape))
            else:
                entries.state[_key(kind, part.name)] = (value,)
    return None


def want_state(entries: Entries, optimizer: Any, names: dict[int, str], values: Any) -> Callable[[], None]:
    """Adds what this rank is to load; to be called when it is there, the result gives it to the optimizer.

    `names` are those of parameters by `id`, `values` what was saved of the optimizer but tensors.
    """
    assert entries.saved is not None
    groups = values["groups"]
    if is_divided(optimizer):
        found = []
        for param, kind, start, now in optimizer._own_state()[0]:
            loaded = torch.zeros_like(now)
            _add_stretch(entries, _key(kind, names[id(param)]), param, start, loaded)
            found.append((param, kind, start, loaded))
        return lambda: optimizer._load_own_state(found, groups, values["step"])
    kinds: dict[str, list[str]] = {}
    for key in entries.saved:
        if key.startswith("optimizer.") and not key.endswith(PADDING):
            _, kind, name = key.split(".", 2)
            kinds.setdefault(name, []).append(kind)
    current = optimizer.state_dict()
    state: dict[Any, dict[str, Any]] = {}
    plain: list[tuple[dict[str, Any], str, str]] = []
    for param, index in _indices(optimizer, current):
        name = names[id(param)]
        for kind in kinds.get(name, ()):
            key, of_param = _key(kind, name), state.setdefault(index, {})
            there = entries.saved[key]
            if not hasattr(there, "size"):
                entries.state[key] = None
                plain.append((of_param, kind, key))
                continue
            part = param.shape if tuple(there.size) == places_of(param)[""].size else there.size
            # Counts of steps are on the host, or the optimizer moves them.
            device = param.device if len(part) else HOST
            of_param[kind] = torch.zeros(part, dtype=there.properties.dtype, device=device)
            entries.add(key, of_param[kind], _places(key, param, part))

    def load() -> None:
        for of_param, kind, key in plain:
            of_param[kind] = entries.state[key][0]
        loaded = []
        for options, now, params in zip(groups, current["param_groups"], _params(optimizer), strict=True):
            own = {name: now[name] for name in _OWN if name in now}
            loaded.append({**{name: _moved(value, params) for name, value in options.items()}, **own})
        optimizer.load_state_dict({"state": state, "param_groups": loaded})

    return load


def _moved(value: Any, params: list[Tensor]) -> Any:
    """An option of a group; a tensor, which a `capturable` optimizer has, where the group's parameters are."""
    return value.to(params[0].device) if isinstance(value, Tensor) and params else value


def _key(kind: str, name: str) -> str:
    return f"optimizer.{kind}.{name}"


def _indices(optimizer: Any, state_dict: dict[str, Any]) -> Iterator[tuple[Tensor, Any]]:
    """The model's parameters, and what a state dict calls them."""
    for params, group in zip(_params(optimizer), state_dict["param_groups"], strict=True):
        yield from zip(params, group["params"], strict=True)


def _places(key: str, param: Tensor, shape: Sequence[int]) -> dict[str, Place]:
    """Of state of the shape of a parameter, or of another one, which is the same on all ranks."""
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
