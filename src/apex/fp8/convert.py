"""Which layers of a model multiply in float8, and why the others do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from ..ops import float8
from .linear import SCALINGS, Float8Linear

# Weights with fewer elements lose more by the casts than they win by the products.
SMALLEST_WEIGHT = 2**21


class Converted(NamedTuple):
    """A linear layer that `convert` looked at; `reason` says why it stays as it was, and is empty if it does not."""

    name: str
    in_features: int
    out_features: int
    reason: str


def convert(
    model: nn.Module,
    scaling: str = "tensorwise",
    *,
    choose: Callable[[str, nn.Linear], bool] | None = None,
    smallest_weight: int = SMALLEST_WEIGHT,
    emulate: bool = False,
) -> list[Converted]:
    """Has the linear layers of `model` multiply in float8, in place, and returns what was done with each of them.

    `scaling` is "tensorwise" (quickest) or "rowwise" (closer to bfloat16). Layers stay as they are where a size is no
    multiple of 16, where the weight has fewer than `smallest_weight` elements, and where `choose(name, layer)` says so;
    give it to leave out an output layer, say. Parameters, hooks and state dict are not touched.

    A device without float8 is refused, unless `emulate` asks for the same numbers without the speed, for tests.
    """
    if scaling not in SCALINGS:
        raise ValueError(f"scaling={scaling!r} is not known; use one of {', '.join(SCALINGS)}")
    layers = [(name, module) for name, module in model.named_modules() if type(module) in (nn.Linear, Float8Linear)]
    if not emulate:
        for device in {module.weight.device for _, module in layers}:
            problem = float8.obstacle(device)
            if problem:
                raise RuntimeError(f"{problem}; train in bfloat16 there, or test with emulate=True")
    report = []
    for name, module in layers:
        reason = _reason(name, module, choose, smallest_weight)
        if not reason:
            module.__class__ = Float8Linear
            module.scaling = scaling
        report.append(Converted(name, module.in_features, module.out_features, reason))
    return report


def _reason(name: str, module: nn.Linear, choose: Callable[[str, nn.Linear], bool] | None, smallest: int) -> str:
    if module.in_features % 16 or module.out_features % 16:
        return "a size is no multiple of 16"
    if module.in_features * module.out_features < smallest:
        return f"fewer than {smallest:,} weights: the casts take longer than the products win"
    if choose is not None and not choose(name, module):
        return "left out by choose"
    return ""


def revert(model: nn.Module) -> None:
    """Undoes `convert`."""
    for module in model.modules():
        if type(module) is Float8Linear:
            module.__class__ = nn.Linear
            module.__dict__.pop("scaling", None)
