"""Calls of one direction of a differentiable function, and words for dtypes and shapes in the names of cases.

A direction is "fwd" for the forward pass, "bwd" for the backward pass alone, "step" for both in one call. Arguments
that require gradients are the leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .registry import Call

SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}

# Makes a function, including imports and compilation; the function returns one tensor or several.
Maker = Callable[[], Callable[..., Any]]


def long_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without the prefix, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def call(
    make: Maker, arguments: Sequence[Any], leaves: Sequence[Tensor], gradient: Tensor | Sequence[Tensor], direction: str
) -> Call:
    """Return a call of one direction of a function: it returns outputs, or the gradients of the leaves."""
    function = make()
    if direction == "fwd":

        def forward() -> Sequence[Tensor]:
            output = function(*arguments)
            return (output,) if isinstance(output, Tensor) else output

        return forward
    if direction == "bwd":
        output = function(*arguments)
        if isinstance(gradient, Tensor):
            gradient = gradient.to(output.dtype)  # a peer may return float32
        return lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True)
    return lambda: torch.autograd.grad(function(*arguments), leaves, gradient)


def times(shape: Sequence[int]) -> str:
    """Return a shape as text, such as "2x320x8x8"."""
    return "x".join(map(str, shape))
