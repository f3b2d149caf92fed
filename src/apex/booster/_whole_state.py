"""State dicts of whole tensors: gathered from all processes for saving, and divided among them for loading.

Parameters may be sharded, divided among tensor-parallel ranks, in another pipeline stage, or in half precision with
float32 masters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint._ranks import refusing_together
from ..ops._host import HOST
from ..transformer._resharding.gathered import full_shape, full_tensor, gather_from_stages, local_part
from ._optimizer_checks import algorithm_of, check_optimizer
from ._zero import load_plain_state
from .wrappers import OptimizerWrapper, masters_of, unwrapped


def chunks_of(model: Any) -> list[nn.Module]:
    """Return the user's modules inside of a boosted model: the model, or the chunks of a pipeline stage."""
    return [unwrapped(chunk) for chunk in getattr(model, "chunks", [model])]


def names_in(chunks: list[nn.Module], has_stages: bool) -> list[dict[str, str]]:
    """Return, for each chunk, the whole model's name of each entry of the chunk's state dict.

    If other processes have other pipeline stages (`has_stages`), all of them must call it.
    """
    if not has_stages and len(chunks) == 1:
        return [{key: key for key in chunks[0].state_dict()}]
    from ..transformer._resharding.model_parts import WholeModel

    described = WholeModel(chunks, ())
    described.join()
    names = {id(part.variable): part.name for part in described.parts}
    whole_names = []
    for chunk in chunks:
        tensors = {**dict(chunk.named_parameters(remove_duplicate=False)), **dict(chunk.named_buffers())}
        whole_names.append({key: names.get(id(tensors.get(key)), key) for key in chunk.state_dict()})
    return whole_names


def _has_stages(boosted: Any) -> bool:
    """Return whether other processes have other pipeline stages of a boosted model or optimizer.

    Process groups cannot answer this: a model without stages may be trained after one with stages.
    """
    return bool(getattr(boosted, "has_stages", False))


def _of_all_stages(boosted: Any, value: Any) -> list[Any]:
    """Gather `value` from all pipeline stages, in their order; return only this process's if there are no stages."""
    return gather_from_stages(value) if _has_stages(boosted) else [value]


def _entries(model: Any) -> Iterator[tuple[nn.Module, str, str, Any, Any]]:
    """Yield every entry of a model's state dicts: chunk, key, name in the whole model, value, parameter.

    The parameter is None for a buffer.
    """
    chunks = chunks_of(model)
    for chunk, names in zip(chunks, names_in(chunks, _has_stages(model)), strict=True):
        params = dict(chunk.named_parameters(remove_duplicate=False))
        for key, value in chunk.state_dict().items():
            yield chunk, key, names[key], value, params.get(key)


def whole_model(model: Any, copies: bool = False) -> dict[str, Tensor]:
    """Return the state dict of the whole model, with the values of float32 masters; all processes must call it.

    If `copies` is set, no tensor shares memory with the model.
    """
    masters = masters_of(model)
    exact = {} if masters is None else masters.read()
    state: dict[str, Any] = {}
    gathered: dict[Tensor, Tensor] = {}  # a parameter with several names is gathered once
    for _, _, name, value, param in _entries(model):
        if param in gathered:
            value = gathered[param]
        elif isinstance(value, Tensor):
            value = full_tensor(exact.get(param, value), param, copies)
            if param is not None:
                gathered[param] = value
        state[name] = value
    return {name: value for stage in _of_all_stages(model, state) for name, value in stage.items()}


def _identity(value: Any, param: Any) -> Any:
    """Return a key that is equal for state dict entries of one tensor: the parameter, or a buffer's memory."""
    if param is not None:
        return param
    local = getattr(value, "_local_tensor", value)  # a DTensor's own address is 0
    address = local.data_ptr() if isinstance(local, Tensor) else 0
    return (address, local.dtype, local.shape, local.stride()) if address else id(value)


def check_tensors(model: Any, shapes: dict[Any, torch.Size | None], strict: bool) -> None:
    """Raise unless tensors of these names and shapes fit a model; all processes must call it.

    If `strict` is set, the model must have exactly these tensors.
    """
    own_shapes: dict[str, torch.Size] = {}
    aliases: dict[Any, set[str]] = {}
    for _, _, name, value, param in _entries(model):
        aliases.setdefault(_identity(value, param), set()).add(name)
        if isinstance(value, Tensor):
            own_shapes[name] = full_shape(value, param)
    # A tensor with several names in the model may have been saved under one of them.
    missing = sorted(name for names in aliases.values() if not names & set(shapes) for name in names)
    known = set().union(*aliases.values())
    unexpected = sorted(str(name) for name in shapes if name not in known)
    if strict and (missing or (unexpected and not _has_stages(model))):
        raise RuntimeError(
            f"the checkpoint does not fit the model: missing {missing[:5]}, unexpected "
            f"{unexpected[:5]}; strict=False loads what fits"
        )
    for name, shape in shapes.items():
        if name in own_shapes and shape != own_shapes[name]:
            saved = "no tensor" if shape is None else f"shape {tuple(shape)}"
            raise RuntimeError(
                f"the checkpoint does not fit the model: {name} has {saved} in it, and shape "
                f"{tuple(own_shapes[name])} in the model"
            )


@torch.no_grad()
def load_tensors(model: Any, parts: Iterable[dict[str, Tensor]]) -> None:
    """Load whole tensors, one dict after the other, after `check_tensors`; all processes must call it."""
    masters = masters_of(model)
    own: dict[str, list[tuple[nn.Module, str, Any, Any]]] = {}
    for chunk, key, name, value, param in _entries(model):
        own.setdefault(name, []).append((chunk, key, value, param))
    exact: dict[Any, Tensor] = {}
    for state in parts:
        local: dict[nn.Module, dict[str, Any]] = {}
        for name, whole_value in state.items():
            for chunk, key, like, param in own.get(name, ()):
                value = whole_value
                if isinstance(value, Tensor):
                    value = local_part(value, like, param)
                    exact[param] = value
                local.setdefault(chunk, {})[key] = value
        for chunk, filled in local.items():
            chunk.load_state_dict(filled, strict=False)
        if masters is not None:
            masters.write({param: value for param, value in exact.items() if param is not None})
            exact.clear()


def whole_optimizer(optimizer: OptimizerWrapper, copies: bool = False) -> dict[str, Any]:
    """Return a state dict of whole tensors, in PyTorch's format, with the loss scale; all processes must call it.

    A group has the names of its parameters (`param_names`) if all of them are known.
    """
    saved = optimizer.optim.state_dict()
    params, names = optimizer.parameters, optimizer.names or [None] * len(optimizer.parameters)
    count = saved["state"].pop("step", None)  # ZeRO has one step count for all parameters
    groups: list[dict[str, Any]] = []
    for group in saved["param_groups"]:
        states = []
        for key in group["params"]:
            state = {} if count is None else {"step": torch.tensor(float(count), dtype=torch.float32, device=HOST)}
            for name, value in saved["state"].get(key, {}).items():
                if isinstance(value, Tensor):
                    value = full_tensor(value, params[key] if value.shape == params[key].shape else None, copies)
                if value is not None and name != "param":  # ZeRO's float32 weights are saved with the model
                    state[name] = value
            states.append((names[key], state))
        groups.append({**group, "params": states})
    joined: dict[str, Any] = {"state": {}, "param_groups": [], "scaler": optimizer.scaler_state()}
    joined["algorithm"] = algorithm_of(optimizer)
    for stage_groups in zip(*_of_all_stages(optimizer, groups), strict=True):
        members = [member for group in stage_groups for member in group["params"]]
        first = len(joined["state"])
        joined["state"].update({first + index: state for index, (_, state) in enumerate(members)})
        options = {**stage_groups[0], "params": list(range(first, first + len(members)))}
        if all(name is not None for name, _ in members):
            options["param_names"] = [name for name, _ in members]
        joined["param_groups"].append(options)
    joined["state"] = {key: state for key, state in joined["state"].items() if state}
    return joined


@torch.no_grad()
def load_optimizer_state(optimizer: OptimizerWrapper, saved: dict[str, Any]) -> None:
    """Load a state dict of `whole_optimizer` or of a PyTorch optimizer; all processes must call it.

    Parameters are matched by name if both sides have names, else by position. A state that does not fit raises an
    error in all processes and changes nothing.
    """
    with refusing_together():
        keys = check_optimizer(optimizer, saved)
    state: dict[Any, Any] = {}
    for index, (param, key) in enumerate(zip(optimizer.parameters, keys, strict=True)):
        values = saved["state"].get(key, {})
        if values:
            state[index] = {
                name: local_part(value, param, param) if isinstance(value, Tensor) and value.dim() else value
                for name, value in values.items()
            }
    groups, first = [], 0
    for group, options in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        loaded = {name: value for name, value in options.items() if name not in ("params", "param_names")}
        last = first + len(group["params"])
        names = {"param_names": group["param_names"]} if "param_names" in group else {}
        groups.append({**loaded, **names, "params": list(range(first, last))})
        first = last
    state_dict = {"state": state, "param_groups": groups}
    # Load the loss scale first: it can be restored, the state of the optimizer cannot.
    before = optimizer.scaler_state()
    try:
        with refusing_together():
            optimizer.load_scaler_state(saved.get("scaler") or {})
        if optimizer._is_zero:
            load_plain_state(optimizer.optim, state_dict)
        else:
            optimizer.optim.load_state_dict(state_dict)
    except BaseException:
        optimizer.load_scaler_state(before)
        raise
