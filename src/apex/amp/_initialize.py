"""Models and optimizers made ready for an opt level; every change can be undone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from . import _casting
from ._amp_state import _amp_state
from ._process_optimizer import process_optimizer, release_optimizer
from ._state_dicts import keep_state_dict_in_float32

HALF = (torch.float16, torch.bfloat16)


def applier(value: Any, fn: Callable[[Any], Any]) -> Any:
    """`fn` on every tensor in nested containers; whatever has a `to` method of its own is asked to use it."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, str) or value is None:
        return value
    if isinstance(value, Mapping):
        return _rebuilt_mapping(value, {applier(key, fn): applier(item, fn) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(applier(item, fn) for item in value))
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(applier(item, fn) for item in value)
    if hasattr(value, "to"):  # batches with a method of their own
        return fn(value)
    return value


def _rebuilt_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    try:
        return type(original)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def to_type(dtype: torch.dtype, value: Any) -> Any:
    """A floating-point tensor cast to `dtype`, anything else as it is."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return value.to(dtype)


def initialize_models_and_optimizers(
    models: Any,
    optimizers: Any,
    properties: Any,
    cast_model_outputs: torch.dtype | None,
    *,
    combine_grad: bool,
    check_combined: bool,
) -> Any:
    """Checks everything first, then changes models and optimizers; returns them as they came."""
    model_list, models_are_list = _as_list(models, nn.Module, "models")
    optimizer_list, optimizers_are_list = _as_list(optimizers, None, "optimizers")
    for optimizer in optimizer_list:
        release_optimizer(optimizer)
    for model in model_list:
        _release_model(model)
    _check_models(model_list, properties)
    _check_optimizers(model_list, optimizer_list)
    for index, model in enumerate(model_list):
        prefix = f"models[{index}]." if len(model_list) > 1 else ""
        _amp_state.names.update({param: prefix + name for name, param in model.named_parameters()})
    originals = _float_originals(optimizer_list) if properties.master_weights else {}
    for model in model_list:
        _prepare_model(model, properties, cast_model_outputs)
    for optimizer in optimizer_list:
        process_optimizer(optimizer, properties, originals, combine_grad=combine_grad, check_combined=check_combined)
    for model in model_list:
        if properties.cast_model_type in HALF:
            keep_state_dict_in_float32(model, optimizer_list)
    if properties.patch_torch_functions:
        from .amp import init  # registers user functions, which may use anything here

        init(loss_scale=properties.loss_scale, patch_type=properties.patch_torch_functions_type)
    returned_models = model_list if models_are_list else model_list[0]
    if optimizers is None:
        return returned_models
    return returned_models, optimizer_list if optimizers_are_list else optimizer_list[0]


def _as_list(value: Any, kind: Any, name: str) -> tuple[list[Any], bool]:
    if value is None:
        return [], True
    if isinstance(value, list):
        return value, True
    if isinstance(value, tuple):
        return list(value), True
    if (kind is not None and isinstance(value, kind)) or (kind is None and hasattr(value, "param_groups")):
        return [value], False
    raise TypeError(f"{name} must be one or a list of them, not {type(value).__name__}")


def _check_models(models: list[nn.Module], properties: Any) -> None:
    for model in models:
        if not isinstance(model, nn.Module):
            raise TypeError(f"models must be torch.nn.Modules, not {type(model).__name__}")
        wrapper = type(model).__name__
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel) or (
            wrapper == "DistributedDataParallel" and hasattr(model, "module")
        ):
            raise RuntimeError(
                f"the model is wrapped in {wrapper} already; call amp.initialize on the bare model first, then wrap it"
            )
        if _amp_state.allow_incoming_model_not_fp32:
            continue
        for name, param in model.named_parameters():
            if param.dtype in HALF:
                raise RuntimeError(
                    f"parameter {name} is {param.dtype} already; amp.initialize takes models in float32 and casts them "
                    "itself, so do not call .half() or .bfloat16() before"
                )


def _check_optimizers(models: list[nn.Module], optimizers: list[Any]) -> None:
    known = {id(param) for model in models for param in model.parameters()}
    for index, optimizer in enumerate(optimizers):
        if type(optimizer).__name__ == "FP16_Optimizer":
            raise RuntimeError("an FP16_Optimizer does mixed precision itself; give amp.initialize the bare optimizer")
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if models and params and not any(id(param) in known for param in params):
            raise RuntimeError(
                f"none of the parameters of optimizer {index} ({type(optimizer).__name__}) belongs to the models given "
                "to amp.initialize; make the optimizer from these models' parameters()"
            )


def _float_originals(optimizers: list[Any]) -> dict[Tensor, Tensor]:
    """Copies of float32 parameters that are about to be cast."""
    return {
        param: param.detach().clone()
        for optimizer in optimizers
        for group in optimizer.param_groups
        for param in group["params"]
        if param.dtype == torch.float32
    }


def _prepare_model(model: nn.Module, properties: Any, cast_model_outputs: torch.dtype | None) -> None:
    cast_type = properties.cast_model_type
    undo: list[Callable[[], None]] = []
    if cast_type and properties.cast_model_type is not torch.float32:
        dtypes = {name: tensor.dtype for name, tensor in _floats_of(model)}
        _cast_model(model, cast_type, bool(properties.keep_batchnorm_fp32))
        undo.append(functools.partial(_uncast_model, model, dtypes))
    elif cast_type:
        _cast_model(model, cast_type, False)
    if cast_type:
        outputs = cast_model_outputs or torch.float32
        undo.append(_patch_forward(model, lambda forward: _cast_forward(forward, cast_type, outputs)))
    elif cast_model_outputs is not None:
        undo.append(_patch_forward(model, lambda forward: _cast_forward(forward, None, cast_model_outputs)))
    if properties.patch_torch_functions:
        dtype = properties.patch_torch_functions_type
        undo.append(_patch_forward(model, lambda forward: _casting.casting_forward(forward, dtype)))
    model._amp_undo = undo  # type: ignore[assignment]
    _amp_state.undo.append(functools.partial(_release_model, model))


def _release_model(model: nn.Module) -> None:
    """Gives a model back as it was before amp, with the values it has now."""
    undo = vars(model).pop("_amp_undo", [])
    while undo:
        undo.pop()()


def _floats_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tensor) for name, tensor in tensors if tensor.is_floating_point()]


def _cast_model(model: nn.Module, dtype: torch.dtype, keep_batchnorm: bool) -> None:
    """Casts parameters and buffers in place; batch norms with parameters stay as they are if they are to be kept."""
    for module in model.modules():
        if keep_batchnorm and isinstance(module, _BatchNorm) and module.affine:
            continue
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
                if tensor.grad is not None:
                    tensor.grad = None
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def _uncast_model(model: nn.Module, dtypes: dict[str, torch.dtype]) -> None:
    for name, tensor in _floats_of(model):
        if tensor.dtype != dtypes.get(name, tensor.dtype):
            tensor.data = tensor.data.to(dtypes[name])
            tensor.grad = None


def _patch_forward(model: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replaces the forward of this one model; the result undoes it."""
    had_own = "forward" in vars(model)
    before = model.forward
    model.forward = wrap(before)  # type: ignore[method-assign]

    def undo() -> None:
        if had_own:
            model.forward = before  # type: ignore[method-assign]
        else:
            vars(model).pop("forward", None)

    return undo


def _cast_forward(forward: Callable[..., Any], inputs: torch.dtype | None, outputs: torch.dtype) -> Callable[..., Any]:
    cast_input = functools.partial(to_type, inputs) if inputs is not None else None
    cast_output = functools.partial(to_type, outputs)

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if cast_input is not None:
            args, kwargs = applier(args, cast_input), applier(kwargs, cast_input)
        return applier(forward(*args, **kwargs), cast_output)

    return wrapper
