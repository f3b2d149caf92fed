"""The rule for the stem of ResNets: a norm and its ReLU that the model's own forward calls, between other layers."""

from __future__ import annotations

import contextlib
import dis
import functools
import types
import weakref
from typing import Any

from torch import Tensor

from .rule import Rule, has_hooks, names_used, random_input
from .vision import batch_norm_relu, is_batch_norm, is_relu


def _calls(kind: type) -> tuple[str, str]:
    """The method that calls conv1, bn1 and an activation before layer1, and the activation's name; "" if none does."""
    for method in ("_forward_impl", "forward_features", "forward"):  # torchvision's, timm's, others'
        used = set(names_used(getattr(kind, method, None)))
        if {"conv1", "bn1", "layer1"} <= used and used & {"act1", "relu"}:
            return method, "act1" if "act1" in used else "relu"
    return "", ""


def _can_be_one(module: Any, activation: Any) -> bool:
    """Whether the norm and its activation can be one call right now."""
    hooks = has_hooks(module.bn1) or has_hooks(activation)
    return is_batch_norm(module.bn1) and is_relu(activation) and not hooks


class _Value:
    """What layers get and give while a forward is only followed."""


def _is_row(method: Any, names: list[str]) -> bool:
    """Whether a forward begins with these layers in a row, uses them once and keeps nothing of what the others gave."""
    called: list[str] = []
    values = [weakref.ref(first := _Value())]
    in_a_row = False

    def stop_after_the_row() -> None:
        nonlocal in_a_row
        if len(called) == len(names):
            in_a_row = called == names and all(value() is None for value in values[1:-1])
            raise StopIteration

    class Followed:
        def __getattr__(self, name: str) -> Any:
            stop_after_the_row()

            def layer(value: _Value) -> _Value:
                stop_after_the_row()
                called.append(name if value is values[-1]() else "")
                values.append(weakref.ref(result := _Value()))
                return result

            return layer

    with contextlib.suppress(Exception):
        method(Followed(), first)
    used = [each.argval for each in dis.get_instructions(method)]
    return in_a_row and all(used.count(name) == 1 for name in names)


def _reason(module: Any) -> str:
    name, activation = _calls(type(module))
    method: Any = getattr(type(module), name)
    if not isinstance(method, types.FunctionType) or hasattr(method, "__wrapped__"):
        return f"its {name} is wrapped by a decorator"
    if not _is_row(method, ["conv1", "bn1", activation]):
        return f"its {name} does not begin with conv1, bn1 and {activation} alone"
    usable = _can_be_one(module, getattr(module, activation))
    return "" if usable else f"bn1 and {activation} are not torch.nn's BatchNorm and ReLU, or have hooks"


def _methods(original: type) -> dict[str, Any]:
    """The method of the model, in which other names have the place of the norm and the activation."""
    name, activation = _calls(original)

    def fused_norm(self: Any, x: Tensor) -> Tensor:
        return batch_norm_relu(self.bn1, x) if _can_be_one(self, getattr(self, activation)) else self.bn1(x)

    def fused_activation(self: Any, x: Tensor) -> Tensor:
        return x if _can_be_one(self, getattr(self, activation)) else getattr(self, activation)(x)

    method: Any = getattr(original, name)
    renamed = {"bn1": "fused_norm", activation: "fused_activation"}
    code = method.__code__.replace(co_names=tuple(renamed.get(each, each) for each in method.__code__.co_names))
    made = types.FunctionType(code, method.__globals__, name, method.__defaults__, method.__closure__)
    made.__kwdefaults__ = method.__kwdefaults__
    wrapped = functools.update_wrapper(made, method, updated=())
    return {name: wrapped, "fused_norm": fused_norm, "fused_activation": fused_activation}


def _plain_stem(module: Any, x: Tensor) -> Tensor:
    return getattr(module, _calls(module.fused_from)[1])(module.bn1(module.conv1(x)))


def _fused_stem(module: Any, x: Tensor) -> Tensor:
    return module.fused_activation(module.fused_norm(module.conv1(x)))


RULES = [
    Rule(
        "stem: batch norm + ReLU",
        lambda module: bool(_calls(type(module))[0]),
        _reason,
        _methods,
        lambda module: random_input(module, 2, next(module.conv1.parameters()).shape[1], 16, 16),
        compared=(_plain_stem, _fused_stem),
    )
]
