"""An optimizer under amp: masters in its groups, and methods that know of scaled gradients and skipped steps."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from ..ops.multi_tensor import scale, zero
from . import _casting
from ._amp_state import HALF, _amp_state, with_digits_of
from ._combined import CombinedGradients
from ._combined_ddp import CombinedReduction
from ._master_params import (
    AmpOptimizerState,
    NonfiniteCounts,
    adopt_changes,
    adopt_frozen,
    after_backward,
    after_backward_scaled,
    before_backward,
    cast_state,
    collect_params,
)
from ._overflow_messages import names_of_parameters
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
    stash.takes_gradients = takes_gradients(optimizer)
    stash.has_masters = bool(properties.master_weights) and not stash.takes_gradients
    for group in optimizer.param_groups:
        group["params"][:] = collect_params(optimizer, group["params"], originals)
    if stash.takes_gradients:
        _hand_over(innermost(optimizer), stash, originals)
    elif not stash.has_masters:
        cast_states(optimizer, half_params(optimizer))
    if combine_grad or check_combined or ddp_parts is not None:
        reduction = None if ddp_parts is None else CombinedReduction(ddp_parts)
        stash.combined = CombinedGradients(stash, check_combined, reduction)
    else:
        stash.optimizer_unscales = stash.has_masters and not getattr(optimizer, "materialize_master_grads", True)
    stash.lazy_init_called = True
    attributes: dict[str, Any] = {
        "step": MethodType(_stepper(optimizer.step), optimizer),
        "zero_grad": MethodType(_zeroer(optimizer.zero_grad), optimizer),
        "add_param_group": MethodType(_group_adder(optimizer.add_param_group), optimizer),
        "load_state_dict": MethodType(_state_loader(optimizer.load_state_dict), optimizer),
        "_lazy_init_maybe_master_weights": MethodType(_lazy_init, optimizer),
        "_master_params_to_model_params": MethodType(_masters_to_model, optimizer),
        "_prepare_amp_backward": MethodType(_prepare_amp_backward, optimizer),
        "_post_amp_backward": MethodType(_post_amp_backward, optimizer),
        # Clients switch it off for optimizers whose parameters are not the same in all processes.
        "combine_ddp": ddp_parts is not None,
    }
    for name, value in attributes.items():
        stash.replaced[name] = vars(optimizer).get(name, _ABSENT)
        setattr(optimizer, name, value)
    _note_models(optimizer)
    _amp_state.optimizers.add(optimizer)


def takes_gradients(optimizer: Any) -> bool:
    """Whether an optimizer takes gradients from parameters during backward passes, and keeps its own masters (ZeRO)."""
    return bool(getattr(innermost(optimizer), "_takes_gradients", False))


def _hand_over(inner: Any, stash: AmpOptimizerState, originals: dict[Tensor, Tensor]) -> None:
    """Lets an optimizer make its own masters, when it first needs them, from weights that were not rounded."""
    for param in stash.all_fp32_from_fp32_params:
        if param in originals and param.dtype in HALF and param.requires_grad:
            _amp_state.masters[param] = originals[param]
    inner._exact_value = _take_exact_value


def _take_exact_value(param: Tensor) -> Tensor | None:
    exact = _amp_state.masters.pop(param, None)
    return None if exact is None else with_digits_of(param.detach(), exact)


def release_optimizer(optimizer: Any) -> None:
    """Gives an optimizer back as it was before amp: model parameters in its groups, with the masters' values."""
    stash: AmpOptimizerState | None = vars(optimizer).pop("_amp_stash", None)
    if stash is None:
        return
    for name, value in stash.replaced.items():
        vars(optimizer).pop(name, None)
        if value is not _ABSENT:
            setattr(optimizer, name, value)
    for name in ("_model_params", "_takes_model_grads", "_wrote_models", "_exact_value"):
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


def half_params(optimizer: Any) -> list[Tensor]:
    """The half-precision parameters that an optimizer updates directly."""
    return [param for group in optimizer.param_groups for param in group["params"] if param.dtype in HALF]


def cast_states(optimizer: Any, params: list[Tensor]) -> None:
    """Brings state to the type that parameters have been cast to: to half precision for O3, and back after it."""
    inner = innermost(optimizer)
    if hasattr(inner, "_model_params"):
        return  # a fused optimizer keeps float32 state
    if takes_gradients(optimizer):
        inner._params_were_cast()
        return
    for param in params:
        if param in optimizer.state:
            others = (torch.float32, torch.float64) if param.dtype in HALF else HALF
            optimizer.state[param] = cast_state(optimizer.state[param], param.dtype, others)


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


def _prepare_amp_backward(self: Any, scaler: LossScaler) -> None:
    stash: AmpOptimizerState = self._amp_stash
    if stash.takes_gradients:
        innermost(self)._set_loss_scale(scaler.scale_tensor())
        return
    if not stash.saw_first_backward:
        adopt_changes(stash)
    if adopt_frozen(self):
        _note_models(self)
    before_backward(stash)


def _post_amp_backward(self: Any, scaler: LossScaler) -> list[NonfiniteCounts]:
    stash: AmpOptimizerState = self._amp_stash
    if stash.takes_gradients:
        inner = innermost(self)
        inner._grad_scale = scaler.scale_tensor().reciprocal()  # zero_grad may have been called since
        if scaler.dynamic:
            scaler.note_overflow(inner._found_inf())
        return []
    if stash.combined is not None:
        return stash.combined.after_backward(scaler, reduces=bool(self.combine_ddp))
    if stash.optimizer_unscales:
        return after_backward_scaled(innermost(self), stash, scaler)
    return after_backward(stash, scaler)


class _Overflow(Exception):
    """Ends a step from inside of a closure whose gradients overflowed."""


def _stepper(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def amp_step(self: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        if closure is not None and not _calls_closure_first(self):
            return _step_with_closure(self, step, closure, *args, **kwargs)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._amp_stash.already_patched:
            _check_gradients(self._amp_stash)
        result = _amp_step(self, step, *((None, *args) if args else ()), **kwargs)
        return loss if closure is not None else result

    return amp_step


def _calls_closure_first(optimizer: Any) -> bool:
    """Whether a step is known to call its closure once, before anything else: then amp can do so in its place."""
    module = getattr(getattr(type(optimizer), "step", None), "__module__", "")
    return module.startswith(("torch.optim.", "apex.")) and not isinstance(optimizer, torch.optim.LBFGS)


def _step_with_closure(
    optimizer: Any, step: Callable[..., Any], closure: Callable[[], Any], *args: Any, **kwargs: Any
) -> Any:
    """A step that calls its closure when and as often as it likes (SAM, LBFGS); an overflow in it undoes the step."""
    stash: AmpOptimizerState = optimizer._amp_stash
    may_skip = any(scaler.dynamic for scaler in _amp_state.loss_scalers)
    params = [param.detach() for param in stash.all_fp32_params] if may_skip else []
    before = [param.clone() for param in params]
    state = {key: copy.deepcopy(value) for key, value in optimizer.state.items()} if may_skip else {}
    loss = None
    cast_closure = _casting.cast_as_here(closure)  # a step runs without casts

    def watched() -> Any:
        nonlocal loss
        _masters_to_model(optimizer)  # the step may have moved the masters
        with torch.enable_grad():
            loss = cast_closure()
        if stash.already_patched or (stash.noop is not None and bool(stash.noop)):
            raise _Overflow
        _check_gradients(stash)
        return loss

    try:
        return _amp_step(optimizer, step, watched, *args, **kwargs)
    except _Overflow:
        for param, value in zip(params, before, strict=True):
            param.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(state)
        _masters_to_model(optimizer)
        stash.already_patched = True
        _amp_step(optimizer, step)  # is skipped
        return loss


def _amp_step(optimizer: Any, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A step: skipped, turned off on the device, or as it is."""
    stash: AmpOptimizerState = optimizer._amp_stash
    result = None
    if stash.already_patched:
        stash.already_patched = False
        _forget_recent_scale(innermost(optimizer))
    else:
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


def _zeroer(zero_grad: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(zero_grad)
    def amp_zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        stash: AmpOptimizerState = self._amp_stash
        stash.stashed = {}
        stash.params_have_scaled_gradients = False
        zero_grad(*args, **kwargs)
        set_to_none = kwargs.get("set_to_none", args[0] if args else None)
        wants_zeros = not (getattr(innermost(self), "set_grad_none", True) if set_to_none is None else set_to_none)
        if wants_zeros and stash.combined is not None:
            stash.combined.zero()
        # The next backward pass would drop zeros that nobody asked for unread: masters have the sums.
        asked = set_to_none is not None or stash.combined is not None or stash.optimizer_unscales
        keeps = wants_zeros and asked
        gradients = []
        for param in stash.all_fp16_params:  # which are not in the optimizer's groups
            if param.grad is not None and keeps:
                param.grad = param.grad.detach()
                gradients.append(param.grad)
            else:
                param.grad = None
        zero(gradients)

    return amp_zero_grad


def _trained(optimizer: Any, state_dict: Any) -> set[Tensor]:
    """Parameters that a state dict has state of: it is to be loaded for a master, in float32."""
    keys = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    params = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return {param for param, key in zip(params, keys, strict=False) if state_dict["state"].get(key)}


def _state_loader(load_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_state_dict)
    def amp_load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if self._amp_stash.frozen and adopt_frozen(self, _trained(self, state_dict)):
            _note_models(self)
        return load_state_dict(state_dict, *args, **kwargs)

    return amp_load_state_dict


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
