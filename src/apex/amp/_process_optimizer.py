"""An optimizer under amp: masters in its groups, and methods that handle scaled gradients and skipped steps."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor

from ._amp_state import HALF, _amp_state, float32_values
from ._combine_grad import CombinedGradients
from ._master_params import AmpOptimizerState, adopt_frozen, cast_states, collect_params, half_params, note_model_params
from .handle import amp_step_of, amp_zero_grad_of, masters_to_model, post_amp_backward, prepare_amp_backward

_ABSENT = object()


def process_optimizer(
    optimizer: Any, properties: Any, originals: dict[Tensor, Tensor], combine: dict[str, Any] | None
) -> None:
    """Prepare an optimizer for amp. `originals` are its parameters' values from before they were cast.

    `combine` holds the options of `CombinedGradients`, or is None if gradients are not combined.
    """
    stash = optimizer._amp_stash = AmpOptimizerState(optimizer)
    stash.has_masters = bool(properties.master_weights) and not stash.takes_gradients
    for group in optimizer.param_groups:
        group["params"][:] = collect_params(optimizer, group["params"], originals)
    if stash.takes_gradients:
        _keep_exact_weights(stash, originals)
    elif not stash.has_masters:
        cast_states(optimizer, half_params(optimizer))
    if combine is not None:
        stash.combined = CombinedGradients(stash, **combine)
    else:
        stash.optimizer_unscales = stash.has_masters and not getattr(optimizer, "materialize_master_grads", True)
    stash.lazy_init_called = True
    methods: dict[str, Any] = {
        "step": amp_step_of(optimizer.step),
        "zero_grad": amp_zero_grad_of(optimizer.zero_grad),
        "add_param_group": _add_param_group_of(optimizer.add_param_group),
        "load_state_dict": _load_state_dict_of(optimizer.load_state_dict),
        "_lazy_init_maybe_master_weights": _masters_are_made,
        "_amp_lazy_init": _masters_are_made,
        "_master_params_to_model_params": masters_to_model,
        "_prepare_amp_backward": prepare_amp_backward,
        "_post_amp_backward": post_amp_backward,
    }
    attributes = {name: MethodType(function, optimizer) for name, function in methods.items()}
    # Clients set `combine_ddp` to False for optimizers whose parameters differ between processes.
    for name, value in {**attributes, "combine_ddp": combine is not None and combine["ddp_parts"] is not None}.items():
        stash.replaced[name] = vars(optimizer).get(name, _ABSENT)
        setattr(optimizer, name, value)
    note_model_params(stash)
    _amp_state.optimizers.add(optimizer)


def _keep_exact_weights(stash: AmpOptimizerState, originals: dict[Tensor, Tensor]) -> None:
    """Let an optimizer make its own masters from the weights before the cast, which are kept until it does."""
    for param in stash.all_fp32_from_fp32_params:
        if param in originals and param.dtype in HALF and param.requires_grad:
            _amp_state.masters[param] = originals[param]
    stash.inner._exact_value = _take_exact_value


def _take_exact_value(param: Tensor) -> Tensor | None:
    exact = _amp_state.masters.pop(param, None)
    return None if exact is None else float32_values(param.detach(), exact)


def release_optimizer(optimizer: Any) -> None:
    """Restore an optimizer as it was before amp: its groups hold the model's parameters, with the masters' values."""
    stash: AmpOptimizerState = vars(optimizer).pop("_amp_stash")
    for name, value in stash.replaced.items():
        vars(optimizer).pop(name, None)
        if value is not _ABSENT:
            setattr(optimizer, name, value)
    for name in ("_model_params", "_takes_model_grads", "_wrote_models", "_exact_value"):
        vars(stash.inner).pop(name, None)
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


def _masters_are_made(self: Any) -> None:
    """Do nothing: initialize makes the masters. Clients call this before they load a checkpoint or list masters."""


def _trained(optimizer: Any, state_dict: Any) -> set[Tensor]:
    """Return the parameters that have state in a state dict; they need a master first, to load it in float32."""
    keys = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    params = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return {param for param, key in zip(params, keys, strict=False) if state_dict["state"].get(key)}


def _load_state_dict_of(load_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_state_dict)
    def amp_load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if self._amp_stash.frozen:
            adopt_frozen(self, _trained(self, state_dict))
        return load_state_dict(state_dict, *args, **kwargs)

    return amp_load_state_dict


def _add_param_group_of(add_param_group: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
    def amp_add_param_group(self: Any, new_group: dict[str, Any]) -> None:
        params = new_group["params"]
        if isinstance(params, Tensor):
            params = [params]
        elif isinstance(params, set):
            raise TypeError("parameters must come in an order that is the same in every run; a set has none")
        named = [param if isinstance(param, tuple) else (None, param) for param in params]
        params = [param for _, param in named]
        stash: AmpOptimizerState = self._amp_stash
        lists = (stash.all_fp16_params, stash.all_fp32_from_fp16_params, stash.all_fp32_from_fp32_params, stash.frozen)
        known = {id(param) for each in lists for param in each}
        if len(known.union(map(id, params))) < len(known) + len(params):
            raise ValueError(
                "some parameters appear in more than one parameter group, or more than once in the new one"
            )
        lengths = [len(each) for each in lists]
        try:
            usable = all(isinstance(param, Tensor) and param.is_leaf for param in params)
            chosen = collect_params(self, params, {}) if usable else params  # PyTorch raises for unusable ones
            if any(name is not None for name, _ in named):
                chosen = [(name, param) for (name, _), param in zip(named, chosen, strict=True)]
            add_param_group({**new_group, "params": chosen})
        except BaseException:
            for each, length in zip(lists, lengths, strict=True):
                del each[length:]
            raise
        if not all(scaler.is_always_one for scaler in _amp_state.loss_scalers):
            for param in params:  # this gradient may be scaled: `scale_loss` did not know the parameter
                param.grad = None
        note_model_params(stash)

    return amp_add_param_group
