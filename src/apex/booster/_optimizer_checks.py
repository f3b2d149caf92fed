"""Checks that the saved state of an optimizer fits the optimizer that is to load it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..amp._checks import OWNERS, checked_number, checked_scale, has_known_step
from ..transformer._resharding.gathered import full_shape
from .wrappers import OptimizerWrapper

# Options that distinguish algorithms. State dicts of PyTorch's optimizers do not name their algorithm.
_DISTINCTIVE_OPTIONS = ("betas", "momentum", "rho", "etas", "lambd")
# State with one value per element of a parameter, in PyTorch's optimizers and ours.
_ELEMENTWISE = {
    "acc_delta",
    "exp_avg",
    "exp_avg_sq",
    "exp_inf",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "sum",
}
# State among `_ELEMENTWISE` names that has one value per parameter in an algorithm, by algorithm.
_NUMBERS = {"NOVOGRAD": {"exp_avg_sq"}}


def algorithm_of(optimizer: OptimizerWrapper) -> str:
    """Return the name of an optimizer's algorithm, which is equal for all of its implementations.

    Adam and AdamW have one name, because their states are alike. A subclass that keeps the step of an optimizer of
    PyTorch or apex has the name of that optimizer.
    """
    kind = type(optimizer.unwrap())
    if has_known_step(optimizer.unwrap()):
        kind = next(base for base in kind.__mro__ if base.__module__.startswith(OWNERS))
    return _algorithm(kind.__name__)


def _algorithm(name: str) -> str:
    kinds = "^(Offloaded)?(Distributed|Divided|Npu|Hybrid|CPU)?(Fused)?(MixedPrecision)?"
    name = re.sub(kinds, "", name, flags=re.IGNORECASE).upper()
    return {"ADAMW": "ADAM"}.get(name, name)


def check_optimizer(optimizer: OptimizerWrapper, saved: Any) -> list[Any]:
    """Return the key in `saved` of each parameter of an optimizer.

    Raises a ValueError or TypeError that names the mismatch: algorithm, parameters, shapes or loss scale.
    """
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
        raise ValueError("the checkpoint holds no state of an optimizer: it lacks 'state' or 'param_groups'")
    ours = algorithm_of(optimizer)
    theirs = _algorithm(str(saved.get("algorithm", ours)))
    if theirs != ours:
        raise ValueError(
            f"the checkpoint has the state of another optimizer, {theirs}; the optimizer is a "
            f"{type(optimizer.unwrap()).__name__}"
        )
    for number, (group, options) in enumerate(zip(optimizer.param_groups, saved["param_groups"], strict=False)):
        for name in _DISTINCTIVE_OPTIONS:
            if (name in group) != (name in options):
                has, lacks = ("optimizer", "checkpoint") if name in group else ("checkpoint", "optimizer")
                raise ValueError(
                    f"the checkpoint has the state of another optimizer: group {number} of the {has} has the option "
                    f"{name}, that of the {lacks} has not"
                )
    keys = _keys(optimizer, saved)
    elementwise = _ELEMENTWISE - _NUMBERS.get(ours, set())
    names = optimizer.names or [None] * len(keys)
    for index, (param, key) in enumerate(zip(optimizer.parameters, keys, strict=True)):
        values = saved["state"].get(key, {})
        own_values = {} if optimizer._is_zero else optimizer.state.get(param, {})
        for name, value in values.items():
            own = own_values.get(name)
            if isinstance(value, Tensor) and (isinstance(own, Tensor) or name in elementwise):
                expected = full_shape(param, param)
                if isinstance(own, Tensor) and own.shape != param.shape:
                    expected = own.shape
                if value.shape != expected:
                    raise ValueError(
                        f"the checkpoint does not fit the optimizer: {name} of parameter "
                        f"{names[index] or index} has shape {tuple(value.shape)}, not {tuple(expected)}"
                    )
    _check_scaler(saved.get("scaler"))
    return keys


def _keys(optimizer: OptimizerWrapper, saved: Mapping[str, Any]) -> list[Any]:
    """Return the key of each parameter, matched by name if both sides have names, else by position."""
    sizes = [[len(group["params"]) for group in groups] for groups in (optimizer.param_groups, saved["param_groups"])]
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    saved_names = [name for group in saved["param_groups"] for name in group.get("param_names", ())]
    by_name = dict(zip(saved_names, keys, strict=False))
    names = optimizer.names or []
    if len(sizes[0]) == len(sizes[1]) and len(by_name) == len(keys) and set(names) <= set(by_name) and names:
        return [by_name[name] for name in names]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the checkpoint has groups of {sizes[1]} parameters, the optimizer of {sizes[0]}")
    return keys


def _check_scaler(state: Any) -> None:
    """Raise unless `state` is a valid state of a GradScaler-like loss scaler; amp checks its own states."""
    if not state:
        return
    owner = "of the loss scale in the checkpoint"
    if not isinstance(state, Mapping):
        raise TypeError(f"the state {owner} must be a dict, not {type(state).__name__}")
    if "scale" not in state:  # a state of amp, whose load_state_dict checks it before changing anything
        return
    lacking = {"growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"} - set(state)
    if lacking:
        raise ValueError(f"the state {owner} lacks {', '.join(sorted(lacking))}")
    checked_scale(f"scale {owner}", state["scale"])
    checked_number(f"growth_factor {owner}", state["growth_factor"], 1.0, 2.0**127, "a finite number of at least 1")
    checked_number(f"backoff_factor {owner}", state["backoff_factor"], 2.0**-126, 1.0, "a positive number up to 1")
    for name, low in (("growth_interval", 1), ("_growth_tracker", 0), ("overflows", 0)):
        accepted = f"an integer of at least {low}"
        if not checked_number(f"{name} {owner}", state.get(name, low), low, math.inf, accepted).is_integer():
            raise ValueError(f"{name} {owner} must be {accepted}, not {state[name]}")
