"""Whole tensors of a model and of an optimizer, whoever has which part of them; and back.

Parameters may be sharded (DTensors of FSDP2), in half precision with float32 masters, divided among tensor-parallel
ranks (`tensor_model_parallel`, `partition_dim`, `partition_stride`), or in another pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops._host import HOST
from ._divided import load_plain_state
from .wrappers import OptimizerWrapper, unwrapped

# Tensors --------------------------------------------------------------------------------------------------------------


def _tensor_group() -> Any:
    """The processes among which layers are divided; None where they are not."""
    from ..transformer import parallel_state

    if parallel_state.is_unitialized() or parallel_state.get_tensor_model_parallel_world_size() == 1:
        return None
    return parallel_state.get_tensor_model_parallel_group()


def _is_divided(param: Any) -> bool:
    return bool(getattr(param, "tensor_model_parallel", False)) and _tensor_group() is not None


def _whole(value: Tensor, param: Any, copies: bool) -> Tensor:
    """A tensor that is laid out like a parameter, or is it, in the host's memory; all processes call it."""
    value = value.detach()
    if hasattr(value, "full_tensor"):
        value = value.to(value.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    if _is_divided(param) and value.dim():
        group, value = _tensor_group(), value.to(param.device)
        stride = getattr(param, "partition_stride", 1)
        gathered = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, value.contiguous(), group=group)
        pieces = [each.chunk(stride, param.partition_dim) for each in gathered]
        parts = [rank[turn] for turn in range(stride) for rank in pieces]
        value = torch.cat(parts, param.partition_dim)
    moved = value.to(HOST)
    return moved.clone() if copies and moved is value else moved


def _part(value: Tensor, like: Tensor, param: Any) -> Tensor:
    """What this process has of a whole tensor, as `like` has it."""
    if _is_divided(param) and value.dim():
        group = _tensor_group()
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        chunks = value.chunk(size * getattr(param, "partition_stride", 1), param.partition_dim)
        value = torch.cat(chunks[rank::size], param.partition_dim)
    if hasattr(like, "placements"):
        from torch.distributed.tensor import distribute_tensor

        mesh = like.device_mesh
        return distribute_tensor(value.to(mesh.device_type), mesh, like.placements).to(like.device)  # type: ignore[arg-type]
    return value


# Models ---------------------------------------------------------------------------------------------------------------


def whole_model(model: Any, copies: bool = False) -> dict[str, Tensor]:
    """The state dict of the whole model, with float32 values where masters keep them; all processes call it.

    With `copies` no tensor is one of the model.
    """
    module = unwrapped(model)
    masters = getattr(model, "masters", None)
    exact = {} if masters is None else masters.read()
    params = dict(module.named_parameters(remove_duplicate=False))
    found: dict[str, Any] = {}
    done: dict[int, Tensor] = {}
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            found[name] = value
            continue
        param = params.get(name)
        key = id(value) if param is None else id(param)
        if key not in done:
            done[key] = _whole(exact.get(param, value) if param is not None else value, param, copies)
        found[name] = done[key]
    return _of_all_stages(found)


def _of_all_stages(found: dict[Any, Any]) -> dict[Any, Any]:
    """What all pipeline stages have, in the order of the stages; in the first process of each pipeline."""
    from ..transformer import parallel_state

    if parallel_state.is_unitialized() or parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return found
    group = parallel_state.get_pipeline_model_parallel_group()
    stages: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(stages, found, group=group)
    return {name: value for stage in stages for name, value in stage.items()}


@torch.no_grad()
def load_tensors(model: Any, parts: Iterable[dict[str, Tensor]], strict: bool) -> None:
    """Loads whole tensors, part by part; raises, with `strict`, if some are missing or not the model's."""
    module = unwrapped(model)
    masters = getattr(model, "masters", None)
    params = dict(module.named_parameters(remove_duplicate=False))
    own = module.state_dict()
    aliases: dict[int, list[str]] = {}
    for name, param in params.items():
        aliases.setdefault(id(param), []).append(name)
    missing, unexpected, exact = set(own), [], {}
    for part in parts:
        local = {}
        for name, value in part.items():
            if name not in own:
                unexpected.append(name)
                continue
            param = params.get(name)
            if not isinstance(value, Tensor):
                local[name] = value
                continue
            local[name] = _part(value, own[name], param)
            if param is not None and masters is not None:
                exact[param] = local[name]
            # A tensor that has several names in the model may have been saved under one.
            missing.difference_update(aliases.get(id(param), ()))
        missing.difference_update(local)
        module.load_state_dict(local, strict=False)
    if masters is not None and exact:
        masters.write(exact)
    if strict and (missing or (unexpected and not _is_stage())):
        raise RuntimeError(
            f"the checkpoint does not fit the {type(module).__name__}: missing {sorted(missing)[:5]}, unexpected "
            f"{sorted(unexpected)[:5]}; strict=False loads what fits"
        )


def _is_stage() -> bool:
    from ..transformer import parallel_state

    return not parallel_state.is_unitialized() and parallel_state.get_pipeline_model_parallel_world_size() > 1


# Optimizers -----------------------------------------------------------------------------------------------------------


def whole_optimizer(optimizer: OptimizerWrapper, copies: bool = False) -> dict[str, Any]:
    """A state dict of whole tensors, with the loss scale; all processes call it."""
    state_dict = optimizer.optim.state_dict()
    params = optimizer.parameters
    count = state_dict["state"].pop("step", None)  # of ZeRO, for all parameters at once
    state: dict[Any, Any] = {}
    for key, values in state_dict["state"].items():
        param = params[key]
        state[key] = {
            name: _whole(value, param if value.shape == param.shape else None, copies)
            if isinstance(value, Tensor)
            else value
            for name, value in values.items()
            if value is not None and name != "param"  # weights are the model's
        }
        if count is not None:
            state[key]["step"] = torch.tensor(float(count), dtype=torch.float32, device=HOST)
    found = {**state_dict, "state": state, "scaler": optimizer.scaler_state()}
    found.pop("format", None)
    return found


@torch.no_grad()
def load_optimizer_state(optimizer: OptimizerWrapper, saved: dict[str, Any]) -> None:
    """Loads what `whole_optimizer` gave, or a state dict of an optimizer of PyTorch's; all processes call it."""
    saved = dict(saved)
    scaler = saved.pop("scaler", None)
    sizes = [[len(group["params"]) for group in groups] for groups in (optimizer.param_groups, saved["param_groups"])]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the checkpoint has groups of {sizes[1]} parameters, the optimizer of {sizes[0]}")
    state: dict[Any, Any] = {}
    for key, values in saved["state"].items():
        param = optimizer.parameters[key]
        state[key] = {
            name: _part(value, param, param) if isinstance(value, Tensor) and value.dim() else value
            for name, value in values.items()
        }
    if optimizer._is_zero:
        load_plain_state(optimizer.optim, {**saved, "state": state})
    else:
        optimizer.optim.load_state_dict({**saved, "state": state})
    if scaler:
        optimizer.load_scaler_state(scaler)
