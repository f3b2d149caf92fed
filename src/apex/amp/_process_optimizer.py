"""An optimizer under amp: masters in its groups, and methods that know of scaled gradients and skipped steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor

from ..ops.multi_tensor import scale
from . import _casting
from ._amp_state import _amp_state
from ._stash import (
    AmpOptimizerState,
    Counted,
    after_backward,
    before_backward,
    collect_params,
    make_masters,
    masters_to_model,
)
from .scaler import LossScaler

_PATCHED = (
    "step",
    "zero_grad",
    "add_param_group",
    "_lazy_init_maybe_master_weights",
    "_master_params_to_model_params",
    "_prepare_amp_backward",
    "_post_amp_backward",
)


def process_optimizer(
    optimizer: Any, properties: Any, originals: dict[Tensor, Tensor], *, combine_grad: bool, check_combined: bool
) -> None:
    """Makes an optimizer ready; `originals` are its parameters from before they were cast."""
    if combine_grad or check_combined:
        raise NotImplementedError("combine_grad is not there yet")
    stash = optimizer._amp_stash = AmpOptimizerState()
    stash.has_masters = bool(properties.master_weights)
    step, add_param_group = optimizer.step, optimizer.add_param_group
    _initialize_params(optimizer, originals)
    optimizer._lazy_init_maybe_master_weights = MethodType(_lazy_init, optimizer)
    optimizer._master_params_to_model_params = MethodType(_masters_to_model, optimizer)
    optimizer._prepare_amp_backward = MethodType(_prepare_amp_backward, optimizer)
    optimizer._post_amp_backward = MethodType(_post_amp_backward, optimizer)
    optimizer.step = MethodType(functools.wraps(step)(_stepper(step)), optimizer)
    optimizer.zero_grad = MethodType(_zero_grad, optimizer)
    optimizer.add_param_group = MethodType(_group_adder(add_param_group), optimizer)
    _amp_state.undo.append(functools.partial(release_optimizer, optimizer))


def release_optimizer(optimizer: Any) -> None:
    """Gives an optimizer back as it was before amp: model parameters in its groups, with the masters' values."""
    stash = vars(optimizer).pop("_amp_stash", None)
    if stash is None:
        return
    for name in _PATCHED:
        vars(optimizer).pop(name, None)
    model_param = dict(zip(stash.all_fp32_from_fp16_params, stash.all_fp16_params, strict=True))
    for group in optimizer.param_groups:
        for index, param in enumerate(group["params"]):
            if param not in model_param:
                continue
            group["params"][index] = restored = model_param[param]
            restored.data = param.detach()
            restored.grad = None
            if param in optimizer.state:
                optimizer.state[restored] = optimizer.state.pop(param)


def _initialize_params(optimizer: Any, originals: dict[Tensor, Tensor]) -> None:
    stash = optimizer._amp_stash
    if stash.has_masters:
        make_masters(optimizer, originals)
    else:
        collect_params(optimizer)
    stash.lazy_init_called = True


def _lazy_init(self: Any) -> None:
    """Masters are made by initialize; clients that call this before loading a checkpoint find them there."""


def _masters_to_model(self: Any) -> None:
    masters_to_model(self._amp_stash, lambda masters, params: scale(masters, params, 1.0))


def _prepare_amp_backward(self: Any) -> None:
    before_backward(self._amp_stash)


def _post_amp_backward(self: Any, scaler: LossScaler) -> list[Counted]:
    return after_backward(self._amp_stash, scaler)


def takes_flag(optimizer: Any) -> bool:
    """Whether a step can be turned off by a flag on the device, without waiting for it."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _stepper(step: Callable[..., Any]) -> Callable[..., Any]:
    def amp_step(self: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        stash: AmpOptimizerState = self._amp_stash
        if closure is not None and (stash.has_masters or stash.already_patched or stash.noop is not None):
            raise RuntimeError("amp does not support closures in optimizer.step: backward happens in amp.scale_loss")
        if stash.already_patched:
            stash.already_patched = False
            result = None
        else:
            with _casting.casts(False):
                result = _flagged_step(self, step, closure, *args, **kwargs)
            _masters_to_model(self)
        stash.noop = None
        for master in stash.all_fp32_from_fp16_params:
            master.grad = None  # a model's zero_grad does not reach it
        return result

    return amp_step


def _flagged_step(optimizer: Any, step: Callable[..., Any], closure: Any, *args: Any, **kwargs: Any) -> Any:
    arguments = args if closure is None else (closure, *args)
    noop = optimizer._amp_stash.noop
    if noop is None:
        return step(*arguments, **kwargs)
    optimizer.found_inf, optimizer.grad_scale = noop, None
    try:
        return step(*arguments, **kwargs)
    finally:
        del optimizer.found_inf, optimizer.grad_scale


def _zero_grad(self: Any, set_to_none: bool = True) -> None:
    """Clears the gradients of parameters and masters."""
    stash: AmpOptimizerState = self._amp_stash
    for param in (*stash.all_fp16_params, *stash.all_fp32_from_fp16_params, *stash.all_fp32_from_fp32_params):
        if param.grad is None:
            continue
        if set_to_none:
            param.grad = None
        else:
            param.grad = param.grad.detach().zero_()


def _group_adder(add_param_group: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
    def amp_add_param_group(self: Any, new_group: dict[str, Any]) -> None:
        params = new_group["params"]
        if isinstance(params, Tensor):
            params = [params]
        elif isinstance(params, set):
            raise TypeError("parameters must come in an order that is the same in every run; a set has none")
        params = list(params)
        stash: AmpOptimizerState = self._amp_stash
        if stash.has_masters:
            from ._stash import _master_for

            params = [_master_for(self, stash, param, {}) for param in params]
        else:
            stash.all_fp32_from_fp32_params.extend(param for param in params if param.requires_grad)
        add_param_group({**new_group, "params": params})

    return amp_add_param_group
