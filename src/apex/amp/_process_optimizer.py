"""An optimizer under amp: masters in its groups, and methods that know of scaled gradients and skipped steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from ..ops.multi_tensor import scale, zero
from . import _casting
from ._amp_state import _amp_state
from ._combined import CombinedGradients
from ._combined_ddp import CombinedReduction
from ._reports import names_of_parameters
from ._stash import (
    HALF,
    AmpOptimizerState,
    Counted,
    adopt_changes,
    adopt_unfrozen,
    after_backward,
    after_backward_scaled,
    before_backward,
    cast_state,
    collect_params,
)
from .scaler import LossScaler

_ABSENT = object()


def process_optimizer(
    optimizer: Any,
    properties: Any,
    originals: dict[Tensor, Tensor],
    *,
    combine_grad: bool,
    check_combined: bool,
    ddp_parts: int | None,
) -> None:
    """Makes an optimizer ready; `originals` are its parameters from before they were cast."""
    stash = optimizer._amp_stash = AmpOptimizerState()
    stash.has_masters = bool(properties.master_weights)
    for group in optimizer.param_groups:
        group["params"][:] = collect_params(optimizer, group["params"], originals)
    if not stash.has_masters:
        _cast_states(optimizer)
    if combine_grad or check_combined or ddp_parts is not None:
        reduction = None if ddp_parts is None else CombinedReduction(ddp_parts)
        stash.combined = CombinedGradients(stash, check_combined, reduction)
    else:
        stash.optimizer_unscales = stash.has_masters and not getattr(optimizer, "materialize_master_grads", True)
    stash.lazy_init_called = True
    methods: dict[str, Callable[..., Any]] = {
        "step": _stepper(optimizer.step),
        "zero_grad": _zero_grad,
        "add_param_group": _group_adder(optimizer.add_param_group),
        "_lazy_init_maybe_master_weights": _lazy_init,
        "_master_params_to_model_params": _masters_to_model,
        "_prepare_amp_backward": _prepare_amp_backward,
        "_post_amp_backward": _post_amp_backward,
    }
    stash.replaced = {name: vars(optimizer).get(name, _ABSENT) for name in methods}
    for name, method in methods.items():
        setattr(optimizer, name, MethodType(method, optimizer))
    # Clients switch it off for optimizers whose parameters are not the same in all processes.
    stash.replaced["combine_ddp"] = vars(optimizer).get("combine_ddp", _ABSENT)
    optimizer.combine_ddp = ddp_parts is not None
    _note_models(optimizer)
    _amp_state.optimizers.add(optimizer)


def release_optimizer(optimizer: Any) -> None:
    """Gives an optimizer back as it was before amp: model parameters in its groups, with the masters' values."""
    stash: AmpOptimizerState | None = vars(optimizer).pop("_amp_stash", None)
    if stash is None:
        return
    for name, value in stash.replaced.items():
        vars(optimizer).pop(name, None)
        if value is not _ABSENT:
            setattr(optimizer, name, value)
    for name in ("_model_params", "_takes_model_grads", "_wrote_models"):
        vars(innermost(optimizer)).pop(name, None)
    model_param = dict(zip(stash.all_fp32_from_fp16_params, stash.all_fp16_params, strict=True))
    for group in optimizer.param_groups:
        for index, param in enumerate(group["params"]):
            if param in model_param:
                group["params"][index] = restored = model_param[param]
                restored.grad = None
                restored.data = param.detach()
                restored.grad = param.grad
                _amp_state.masters.pop(restored, None)
                if param in optimizer.state:
                    optimizer.state[restored] = optimizer.state.pop(param)
    _amp_state.optimizers.discard(optimizer)


def innermost(optimizer: Any) -> Any:
    """The optimizer that makes the update: what LARC has inside, or the optimizer itself."""
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else getattr(optimizer, "optim", optimizer)


def _cast_states(optimizer: Any) -> None:
    """State that an optimizer had before its parameters were cast, in the type of the parameters (O3)."""
    if hasattr(innermost(optimizer), "_model_params"):
        return  # a fused optimizer keeps float32 state
    for param in optimizer._amp_stash.all_fp32_from_fp32_params:
        if param.dtype in HALF and param in optimizer.state:
            optimizer.state[param] = cast_state(optimizer.state[param], param.dtype, (torch.float32, torch.float64))


def _note_models(optimizer: Any) -> None:
    """Lets a fused optimizer write a model's parameters in the pass that updates their masters."""
    stash: AmpOptimizerState = optimizer._amp_stash
    inner = innermost(optimizer)
    if hasattr(inner, "_model_params"):
        inner._model_params = dict(zip(stash.all_fp32_from_fp16_params, stash.all_fp16_params, strict=True))
        inner._takes_model_grads = stash.optimizer_unscales


def takes_flag(optimizer: Any) -> bool:
    """Whether a step can be turned off by a flag on the device, without waiting for it."""
    inner = innermost(optimizer)
    if not getattr(inner, "_step_supports_amp_scaling", False):
        return False
    # A subclass with a step of its own, written for the original, knows nothing of flags.
    return not hasattr(inner, "_model_params") or type(inner).step.__module__.startswith("apex.")


# Methods of the optimizer --------------------------------------------------------------------------------------------


def _lazy_init(self: Any) -> None:
    """Masters are made by initialize; clients that call this before loading a checkpoint find them there."""


def _masters_to_model(self: Any) -> None:
    """Gives the model's parameters the values of their masters."""
    stash: AmpOptimizerState = self._amp_stash
    if stash.all_fp16_params:
        masters = [master.detach() for master in stash.all_fp32_from_fp16_params]
        scale(masters, [param.detach() for param in stash.all_fp16_params], 1.0)


def _prepare_amp_backward(self: Any) -> None:
    stash: AmpOptimizerState = self._amp_stash
    if not stash.saw_first_backward:
        adopt_changes(stash)
    if adopt_unfrozen(self):
        _note_models(self)
    before_backward(stash)


def _post_amp_backward(self: Any, scaler: LossScaler) -> list[Counted]:
    stash: AmpOptimizerState = self._amp_stash
    if stash.combined is not None:
        return stash.combined.after_backward(scaler, reduces=bool(self.combine_ddp))
    if stash.optimizer_unscales:
        return after_backward_scaled(innermost(self), stash, scaler)
    return after_backward(stash, scaler)


def _stepper(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def amp_step(self: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        stash: AmpOptimizerState = self._amp_stash
        if closure is not None and isinstance(innermost(self), torch.optim.LBFGS):
            if stash.has_masters or any(scaler.dynamic for scaler in _amp_state.loss_scalers):
                raise RuntimeError(
                    "amp does not support closures that are called several times in a step (LBFGS) together with "
                    "master weights or a dynamic loss scale; use O0, O4, or O1 with loss_scale=1.0"
                )
            cast_closure = _casting.cast_as_here(closure)
            with _casting.casts(False):
                return step(cast_closure, *args, **kwargs)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        result = _amp_step(self, step, *((None, *args) if args else ()), **kwargs)
        return loss if closure is not None else result

    return amp_step


def _amp_step(optimizer: Any, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A step without closure: skipped, turned off on the device, or as it is."""
    stash: AmpOptimizerState = optimizer._amp_stash
    result = None
    if stash.already_patched:
        stash.already_patched = False
        _forget_recent_scale(innermost(optimizer))
    else:
        _check_gradients(stash)
        inner = innermost(optimizer)
        inner._wrote_models = False
        with _casting.casts(False):
            result = _flagged_step(inner, stash.noop, step, *args, **kwargs)
        if not inner._wrote_models:
            _masters_to_model(optimizer)
    stash.noop = None
    for master in stash.all_fp32_from_fp16_params:
        master.grad = None  # a model's zero_grad does not reach it
    return result


def _flagged_step(inner: Any, noop: Tensor | None, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if noop is None:
        return step(*args, **kwargs)
    inner.found_inf, inner.grad_scale = noop.reshape(()), None
    try:
        return step(*args, **kwargs)
    finally:
        del inner.found_inf, inner.grad_scale


def _forget_recent_scale(inner: Any) -> None:
    if hasattr(inner, "most_recent_scale"):
        inner.most_recent_scale = 1.0
        inner.scale_set_by_backward = False


def _check_gradients(stash: AmpOptimizerState) -> None:
    """Raises where a step would be of no use, or where `check_combined_tensors` finds gradients that moved."""
    if stash.combined is not None and stash.combined.check:
        moved = stash.combined.moved_away()
        if moved:
            names = names_of_parameters()
            called = [names.get(id(param), f"a parameter of shape {tuple(param.shape)}") for param in moved]
            raise RuntimeError(
                f"the gradients of {len(moved)} parameter(s) are not in the combined buffer any more: "
                f"{', '.join(called[:5])}. Change gradients in place (param.grad.mul_(...)) instead of replacing them, "
                "or call amp.initialize without check_combined_tensors to have them copied back"
            )
    if stash.optimizer_unscales or not stash.all_fp16_params:
        return
    if all(param.grad is None for param in stash.all_fp32_params) and any(
        param.grad is not None for param in stash.all_fp16_params
    ):
        raise RuntimeError(
            "optimizer.step() finds gradients on the model's half-precision parameters but none on their float32 "
            "masters: call backward inside `with amp.scale_loss(loss, optimizer) as scaled_loss`, and let the last "
            "one before a step be without delay_unscale"
        )


def _zero_grad(self: Any, set_to_none: bool | None = None) -> None:
    """Clears the gradients of parameters and masters; frees them unless the optimizer or the caller wants zeros."""
    stash: AmpOptimizerState = self._amp_stash
    wants_zeros = not (getattr(innermost(self), "set_grad_none", True) if set_to_none is None else set_to_none)
    stash.stashed = {}
    stash.params_have_scaled_gradients = False
    params = [*stash.model_params, *stash.all_fp32_from_fp16_params, *stash.frozen]
    if wants_zeros and set_to_none is None and stash.combined is None and not stash.optimizer_unscales:
        # The next backward pass would drop these zeros unread: masters have the sums.
        for param in stash.all_fp16_params:
            param.grad = None
    if wants_zeros and stash.combined is not None:
        stash.combined.zero()
    gradients = []
    for param in params:
        gradient = param.grad
        if gradient is None:
            continue
        if not wants_zeros:
            param.grad = None
            continue
        if gradient.requires_grad:
            gradient = param.grad = gradient.detach()
        gradients.append(gradient)
    zero(gradients)


def _group_adder(add_param_group: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
    def amp_add_param_group(self: Any, new_group: dict[str, Any]) -> None:
        params = new_group["params"]
        if isinstance(params, Tensor):
            params = [params]
        elif isinstance(params, set):
            raise TypeError("parameters must come in an order that is the same in every run; a set has none")
        stash: AmpOptimizerState = self._amp_stash
        named = [param if isinstance(param, tuple) else (None, param) for param in params]
        params = collect_params(self, [param for _, param in named], {})
        if any(name is not None for name, _ in named):
            params = [(name, param) for (name, _), param in zip(named, params, strict=True)]
        stash.combined = stash.combined and stash.combined.renewed()
        add_param_group({**new_group, "params": params})
        _note_models(self)

    return amp_add_param_group
