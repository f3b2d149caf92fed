"""Experts whose matrices' gradients are added to `main_grad`, as layers with gradient accumulation fusion need it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _library
from . import reference
from .launches_backward import launch_backward
from .op import FAMILY, MOE_EXPERTS, prepare
from .problem import takes


def moe_experts_main_grad(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    weight: Tensor,
    *,
    wanted: Callable[..., tuple[bool, ...]],
    bias: tuple[Tensor | None, Tensor | None] | None = None,
    activation: str = "silu",
    interleaved: bool = False,
    transposed: bool = False,
) -> Tensor:
    """Return `moe_experts`; the backward pass adds to `gate_up.main_grad` and `down.main_grad` and sets no `grad`.

    Sums are added in float32 before they are rounded to the dtype of `main_grad`. The `main_grad` of an expert without
    rows does not change, and frozen matrices need none. `wanted(input, *parameters)` says which gradients to compute in
    the current part of a split backward pass, as `apex.transformer.tensor_parallel.backward_part.wanted` does.
    """
    for name, parameter in (("gate_up", gate_up), ("down", down)):
        main_grad = getattr(parameter, "main_grad", None)
        if not parameter.requires_grad:
            continue
        if not isinstance(main_grad, Tensor) or main_grad.shape != parameter.shape or not main_grad.is_contiguous():
            raise RuntimeError(
                f"{name} needs a contiguous main_grad of its own shape: allocate it, for example "
                f"`{name}.main_grad = torch.zeros_like({name}, dtype=torch.float32)`"
            )
    arguments = prepare(x, gate_up, down, index, weight, bias, activation, interleaved, transposed)
    return _AddedToMainGrad.apply(*arguments, gate_up, down, wanted)


class _AddedToMainGrad(torch.autograd.Function):
    """The autograd node of `moe_experts_main_grad`."""

    @staticmethod
    def forward(ctx, *values):  # type: ignore[no-untyped-def, override]
        *arguments, gate_up, down, wanted = values
        ctx.main_grads, ctx.wanted = (gate_up, down), wanted
        return MOE_EXPERTS.forward_and_save(ctx, *arguments)

    @staticmethod
    @_library.once_differentiable
    def backward(ctx, dy):  # type: ignore[no-untyped-def, override]
        need_x, need_gate_up, need_down, _, need_weight, *need_biases = ctx.needs_input_grad[:7]
        need_x, need_gate_up, need_down, *need_biases = ctx.wanted(need_x, need_gate_up, need_down, *need_biases)
        (need_weight,) = ctx.wanted(need_weight)
        wanted = (need_x, need_gate_up, need_down, need_weight, *need_biases)
        into = [matrix.main_grad if need else None for matrix, need in zip(ctx.main_grads, wanted[1:3], strict=True)]
        dx, _, _, dweight, *dbiases = accumulate(dy, ctx.saved_tensors, ctx.settings, wanted, into)
        return dx, None, None, None, dweight, *dbiases, *(None,) * 6


def accumulate(
    dy: Tensor, saved: Sequence[Any], settings: Sequence[Any], wanted: Sequence[bool], into: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Add the matrices' gradients to the tensors in `into`; return the other wanted gradients."""
    arguments: list[Any] = [dy.contiguous(), *saved, *settings, wanted]
    if takes(*saved[1:4]) and _library.runs_triton_now(FAMILY, saved[0]):
        return launch_backward(*[*arguments, into])
    gradients = list(reference.backward(*arguments))
    for index, target in enumerate(into, 1):
        if target is not None:
            target.add_(gradients[index])  # type: ignore[arg-type]
        gradients[index] = None
    return tuple(gradients)
