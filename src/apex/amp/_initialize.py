"""Preparation of models and optimizers for an opt level: all checks come first, and every change can be undone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._distributed.shards import is_sharded
from . import _autocast
from ._amp_state import HALF, _amp_state, float32_values, warn_or_err
from ._checks import checked_optimizers
from ._containers import applier, to_type
from ._master_params import cast_states, half_params, innermost, takes_gradients
from ._model_casts import dtype_before, prepare_model, release_model
from ._process_optimizer import process_optimizer, release_optimizer
from ._rollback import unchanged_on_failure
from .amp import init

__all__ = ["applier", "initialize_models_and_optimizers", "release", "release_all", "to_type"]


def initialize_models_and_optimizers(
    models: Any,
    optimizers: Any,
    properties: Any,
    cast_model_outputs: torch.dtype | None,
    combine: dict[str, Any] | None,
) -> Any:
    """Check models and optimizers, then change all or none of them, and return them as passed, single or in lists.

    `combine` holds the options of `CombinedGradients`, or is None if gradients are not combined.
    """
    model_list, optimizer_list = as_lists(models, optimizers)
    _check_models(model_list, properties)
    _check_sharded(model_list, properties, combine is not None)
    _check_optimizers(model_list, optimizer_list, properties, combine is not None)
    with unchanged_on_failure(model_list, optimizer_list):
        release(model_list, optimizer_list)
        # No copies: casting gives the parameters other memory, and the masters take over the old memory.
        originals = {
            param: param.detach()
            for optimizer in optimizer_list
            for group in optimizer.param_groups
            for param in group["params"]
            if properties.master_weights and param.dtype == torch.float32
        }
        for model in model_list:
            prepare_model(model, properties, cast_model_outputs)
        for optimizer in optimizer_list:
            process_optimizer(optimizer, properties, originals, combine)
        if properties.patch_torch_functions:
            init(loss_scale=properties.loss_scale, patch_type=properties.patch_torch_functions_type)
        else:
            _autocast.leave_thread()
    return as_they_came(models, optimizers)


def as_they_came(models: Any, optimizers: Any) -> Any:
    """Return models alone, or with optimizers, as `initialize` does; a tuple becomes a list."""
    models = list(models) if isinstance(models, tuple) else models
    optimizers = list(optimizers) if isinstance(optimizers, tuple) else optimizers
    return models if optimizers is None else (models, optimizers)


def release(models: list[Any], optimizers: list[Any]) -> None:
    """Undo `initialize` for models, optimizers, and other optimizers of these models' half-precision weights."""
    params = {id(param) for model in models for param in model.parameters() if param.dtype in HALF}
    released = []
    for optimizer in list(_amp_state.optimizers):
        if optimizer in optimizers or any(id(param) in params for param in optimizer._amp_stash.model_params):
            release_optimizer(optimizer)
            released.append((optimizer, half_params(optimizer)))
    for model in models:
        for param in model.parameters():
            exact = _amp_state.masters.pop(param, None)
            if exact is not None:
                gradient, param.grad = param.grad, None
                param.data = float32_values(param.detach(), exact)
                param.grad = None if gradient is None else gradient.float()
        release_model(model)
    for optimizer, params_cast in released:
        if params_cast:
            cast_states(optimizer, params_cast)


def release_all() -> None:
    """Undo `initialize` for every model and optimizer."""
    release(list(_amp_state.models), list(_amp_state.optimizers))


def as_lists(models: Any, optimizers: Any) -> tuple[list[Any], list[Any]]:
    """Return models and optimizers, passed singly or in lists, as two lists."""
    if isinstance(models, nn.Module):
        models = [models]
    elif not isinstance(models, list | tuple):
        raise TypeError(f"models must be a torch.nn.Module or a list of them, not {type(models).__name__}")
    for model in models:
        if not isinstance(model, nn.Module):
            raise TypeError(f"models must be torch.nn.Modules, not {type(model).__name__}")
    return list(models), [] if optimizers is None else checked_optimizers(optimizers)


def _check_models(models: list[nn.Module], properties: Any) -> None:
    for model in models:
        wrapper = type(model).__name__
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel) or (
            wrapper == "DistributedDataParallel" and hasattr(model, "module")
        ):
            raise RuntimeError(
                f"the model is wrapped in {wrapper} already; call amp.initialize on the bare model first, then wrap it"
            )
        if isinstance(model, torch.jit.ScriptModule) and properties.cast_model_type:
            raise TypeError(
                "a scripted model has a fixed forward pass: use O1 or O4, or call amp.initialize before torch.jit"
            )
        if _amp_state.allow_incoming_model_not_fp32:
            continue
        before = dtype_before(model)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if before(name, tensor) in HALF:
                warn_or_err(
                    f"parameter or buffer {name} is {tensor.dtype} already; amp.initialize takes models in float32 and "
                    "casts them itself, so do not call .half() or .bfloat16() before"
                )
        doubles = [name for name, param in model.named_parameters() if before(name, param) == torch.float64]
        if doubles and (properties.master_weights or properties.keep_batchnorm_fp32):
            warn_or_err(
                f"parameter {doubles[0]} is torch.float64, and {properties.opt_level} has master weights and "
                "batch norms in float32: call model.float() before the optimizer is made, or use opt_level='O1' or 'O4'"
            )


def _check_sharded(models: list[nn.Module], properties: Any, combines: bool) -> None:
    """Raise an error for models that are sharded over processes in a way that the opt level cannot handle."""
    cast_type = properties.cast_model_type if properties.cast_model_type in HALF else None
    scales = properties.loss_scale != 1.0
    for model in models:
        wrapped = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
        names = [name for name, param in model.named_parameters() if wrapped or is_sharded(param)]
        if not names:
            continue
        who = f"parameter {names[0]} is sharded over processes"
        if combines:
            raise RuntimeError(f"{who}; combine_grad and check_combined_tensors need parameters that are whole")
        if wrapped and (cast_type is not None or scales):
            raise RuntimeError(
                f"{who} by FullyShardedDataParallel, whose weights amp cannot cast and whose overflows stay unknown to "
                "other processes; use fully_shard, or opt_level='O4', or 'O1' with loss_scale=1.0"
            )
        if cast_type is None:
            continue
        if not properties.master_weights:
            raise RuntimeError(
                f"{who}, as float32 master weights, which {properties.opt_level} is without; use opt_level='O2' or 'O5'"
            )
        if any(policy != cast_type for policy in _policies(model)) or not _policies(model):
            raise RuntimeError(
                f"{who}; with {properties.opt_level} shards stay float32, as master weights, and the sharding casts "
                f"them: give fully_shard mp_policy=MixedPrecisionPolicy(param_dtype={cast_type}) for every module. Or "
                "use opt_level='O4' or 'O1', which cast inside of the forward pass"
            )


def _policies(model: nn.Module) -> list[torch.dtype | None]:
    """Return the dtype that each module of `fully_shard` casts its weights to for the forward pass."""
    states = [module._get_fsdp_state() for module in model.modules() if hasattr(module, "_get_fsdp_state")]  # type: ignore[operator]
    return [state._mp_policy.param_dtype for state in states]


def _check_optimizers(models: list[nn.Module], optimizers: list[Any], properties: Any, combines: bool) -> None:
    for optimizer in optimizers:
        if type(optimizer).__name__ == "FP16_Optimizer":
            raise RuntimeError("an FP16_Optimizer does mixed precision itself; give amp.initialize the bare optimizer")
        kind = type(innermost(optimizer))
        refusal = getattr(kind, "_refuses_amp", None)
        if refusal is not None:
            raise RuntimeError(f"{kind.__module__}.{kind.__name__} is not for amp; {refusal}")
        if properties.master_weights and getattr(innermost(optimizer), "_encodes", False):
            inner = innermost(optimizer)
            raise ValueError(
                f"state_format={inner.state_format!r}, master_bits={inner.master_bits!r} of {kind.__name__} need the "
                f"model's own parameters, not the float32 masters that {properties.opt_level} makes; use opt_level="
                "'O1' or 'O4', or a bfloat16 model with master_bits and without amp"
            )
        if takes_gradients(optimizer):
            _check_zero_optimizer(innermost(optimizer), properties, combines)
    _check_models_are_updated(models, optimizers)


def _check_models_are_updated(models: list[nn.Module], optimizers: list[Any]) -> None:
    """Raise an error if optimizers have parameters, but none that belongs to the models.

    An optimizer may update other parameters besides: the centers of a center loss have their own optimizer.
    """
    known = {id(param) for model in models for param in model.parameters()}
    updated = [param for optimizer in optimizers for param in _model_params(optimizer)]
    if known and updated and not any(id(param) in known for param in updated):
        kinds = ", ".join(type(innermost(optimizer)).__name__ for optimizer in optimizers)
        raise RuntimeError(
            f"none of the parameters of the optimizer ({kinds}) belongs to the models given to amp.initialize; make "
            "the optimizer from these models' parameters()"
        )


def _check_zero_optimizer(optimizer: Any, properties: Any, combines: bool) -> None:
    """Raise an error for arguments of `initialize` that ZeRO optimizers do not support, or if it has state already."""
    kind = type(optimizer).__name__
    if combines:
        raise RuntimeError(
            f"combine_grad, combine_ddp and check_combined_tensors are not for {kind}, which takes gradients away "
            "during backward passes and averages them over processes itself; call amp.initialize without them"
        )
    if properties.cast_model_type in HALF and optimizer._has_state:
        raise RuntimeError(
            f"{kind} has been used already: its state was made for parameters of the type that {properties.opt_level} "
            "would change; call amp.initialize before the first backward pass, init_params and load_state_dict, with a "
            "new optimizer"
        )


def _model_params(optimizer: Any) -> list[Tensor]:
    """Return the model's parameters that an optimizer updates, directly or through masters."""
    stash = getattr(optimizer, "_amp_stash", None)
    masters = {} if stash is None else dict(zip(stash.all_fp32_from_fp16_params, stash.all_fp16_params, strict=True))
    return [masters.get(param, param) for group in optimizer.param_groups for param in group["params"]]
