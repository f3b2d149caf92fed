"""Checks of hyperparameters for every optimizer, by their names in parameter groups."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required

_AT_LEAST_ZERO = {
    *("lr", "eps", "e", "weight_decay", "momentum", "alpha", "trust_coefficient", "delta", "wd_ratio"),
    *("lr_decay", "initial_accumulator_value", "adam_eps", "momentum_decay", "r", "weight_lr_power"),
}
_BELOW_ONE = {"b1", "b2"}
_FLAGS = {
    *("amsgrad", "bias_correction", "centered", "decoupled_decay", "grad_averaging", "init_zero", "is_skipped"),
    *("lr_in_momentum", "nesterov", "master_weights", "stochastic_rounding", "capturable", "set_grad_none"),
    *("materialize_master_grads", "cautious_weight_decay", "flatten", "decoupled_weight_decay", "train_mode"),
}
# Options that distinguish optimizers in a state dict.
HYPERPARAMETERS = _AT_LEAST_ZERO | _BELOW_ONE | {"betas", "dampening", "max_grad_norm", "rho"}


def check_options(options: Mapping[str, Any]) -> None:
    """Raise an error if a hyperparameter is invalid for every optimizer; unknown names are not checked."""
    for name, value in options.items():
        if value is required:
            continue  # PyTorch raises if it is missing
        if name in _AT_LEAST_ZERO:
            if _number(name, value) < 0:
                raise ValueError(f"{name}={value} is negative")
            _finite(name, value)
        elif name in _BELOW_ONE:
            _below_one(name, value)
        elif name == "betas":
            if isinstance(value, str) or not hasattr(value, "__len__") or len(value) != 2:
                raise ValueError(f"betas={value!r} are not two numbers in [0, 1)")
            for index, beta in enumerate(value):
                _below_one(f"betas[{index}]", beta)
        elif name == "rho":
            if not 0.0 <= _number(name, value) <= 1.0:
                raise ValueError(f"rho={value} is not in [0, 1]")
        elif name == "dampening":
            _finite(name, value)
        elif name == "max_grad_norm":  # infinity, 0 and None mean no limit
            if value is not None and _number(name, value) < 0:
                raise ValueError(f"max_grad_norm={value} is negative")
        elif name in _FLAGS:
            _flag(name, value)


# Options that belong to a whole optimizer, and have no effect in one of its groups.
_OF_ALL_GROUPS = (
    *("master_weights", "stochastic_rounding", "capturable", "materialize_master_grads", "set_grad_none"),
    *("state_format", "master_bits", "adam_w_mode", "adagrad_w_mode", "wd_after_momentum", "reg_inside_moment"),
    *("use_nvlamb", "max_grad_norm", "fraction", "minimal_size", "where"),
)


def check_group(optimizer: Any, group: Mapping[str, Any]) -> None:
    """Raise an error if a parameter group has an option that fused optimizers lack, or that all groups share."""
    for name in ("maximize", "differentiable"):
        if group.get(name):
            raise ValueError(f"{name}={group[name]} of a parameter group is not available in fused optimizers")
    for name in _OF_ALL_GROUPS:
        if name in group and group[name] != getattr(optimizer, name, group[name]):
            raise ValueError(
                f"{name}={group[name]!r} of a parameter group has no effect, because all groups share this option: "
                f"give it to {type(optimizer).__name__} itself"
            )


def check_cautious(amsgrad: Any, decoupled: Any, option: str = "adam_w_mode") -> None:
    """Raise an error if an optimizer with these options has no cautious weight decay; `option` decouples the decay."""
    if amsgrad:
        raise ValueError("amsgrad=True and cautious_weight_decay=True are not available together")
    if not decoupled:
        raise ValueError(f"cautious_weight_decay=True needs {option}=True: L2 decay is a part of the gradient")


def check_decay(options: Mapping[str, Any], decoupled: Any, remedy: str) -> None:
    """Raise an error if a group's weight decay is of the other kind; torch.optim saves the kind in each group."""
    saved = options.get("decoupled_weight_decay")
    if saved is None or bool(saved) == bool(decoupled) or not options["weight_decay"]:
        return
    kinds = {True: "decoupled from the gradient, as in AdamW", False: "added to the gradient (L2), as in Adam"}
    raise ValueError(
        f"decoupled_weight_decay={saved} with weight_decay={options['weight_decay']} means decay {kinds[bool(saved)]}, "
        f"but here it is {kinds[bool(decoupled)]}: {remedy}"
    )


def check_nesterov(options: Mapping[str, Any]) -> None:
    """Raise an error if Nesterov momentum is requested without momentum or with dampening."""
    momentum, dampening = options["momentum"], options["dampening"]
    if options["nesterov"] and (momentum <= 0 or dampening != 0):
        raise ValueError(f"nesterov needs a momentum and no dampening, not {momentum=} and {dampening=}")


def _number(name: str, value: Any) -> float:
    """Return the value of a number; return 0 for a tensor on a device, to avoid waiting for it."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise ValueError(f"{name} is a {value.dtype} tensor of shape {tuple(value.shape)}, not one real number")
        if type(value) not in (Tensor, torch.nn.Parameter) or not value.is_cpu:
            return 0.0
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not a number")
    number = float(value)
    if math.isnan(number):
        raise ValueError(f"{name}={value} is not a number")
    return number


def _finite(name: str, value: Any) -> None:
    if math.isinf(_number(name, value)):
        raise ValueError(f"{name}={value} is infinite")


def _below_one(name: str, value: Any) -> None:
    if not 0.0 <= _number(name, value) < 1.0:
        raise ValueError(f"{name}={value} is not in [0, 1)")


def _flag(name: str, value: Any) -> None:
    is_flag = isinstance(value, numbers.Integral) or type(value).__name__ in ("bool", "bool_")  # also NumPy's bool
    if not is_flag or int(value) not in (0, 1):
        raise TypeError(f"{name}={value!r} is neither True nor False")


def check_step(name: str, value: Any) -> int:
    """Return the value of a step count; raise an error if it is not one."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, numbers.Real) or not float(value).is_integer() or value < 0:  # rejects infinity and NaN
        raise ValueError(f"{name}={value!r} is not a count of steps")
    return int(float(value))
