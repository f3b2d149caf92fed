"""The norms with autograd: one pair of functions behind every norm's `torch.autograd.Function`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _library
from . import reference
from .checks import check_row_length, checked_shape
from .dispatch import FAMILY, norm_backward, norm_forward
from .launches import backward_plan, triton_forward


def forward_and_save(
    ctx: Any,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: int | Sequence[int],
    eps: float,
    memory_efficient: bool,
    subtract_mean: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """The forward of every norm's autograd Function."""
    shape = checked_shape(input, normalized_shape, weight, bias)
    return _forward_and_save(ctx, input, weight, bias, shape, eps, memory_efficient, subtract_mean, out_dtype)


def _forward_and_save(
    ctx: Any,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: Sequence[int],
    eps: float,
    memory_efficient: bool,
    subtract_mean: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """The same for arguments that were checked before."""
    row_length = check_row_length(shape)
    plan = None
    if torch.compiler.is_compiling():
        output, mean, rstd = torch.ops.apex.norm_forward(
            input, weight, bias, row_length, eps, subtract_mean, memory_efficient, out_dtype
        )
    elif input.numel() and _library.runs_triton(FAMILY, input):
        output, mean, rstd = triton_forward(input, weight, bias, row_length, eps, subtract_mean, out_dtype)
        if any(ctx.needs_input_grad):
            plan = _plan_backward(
                ctx, input, output, weight, bias, row_length, eps, memory_efficient, subtract_mean, out_dtype
            )
    else:
        output, mean, rstd = norm_forward(input, weight, bias, row_length, eps, subtract_mean, out_dtype)
        output = output.detach()  # not a view of another tensor, which autograd would not let the caller change
    ctx.save_for_backward(output if memory_efficient else input, weight, bias, None if memory_efficient else mean, rstd)
    ctx.plan = plan
    ctx.constants = (row_length, eps, subtract_mean, memory_efficient, input.dtype)
    return output


def _plan_backward(
    ctx: Any,
    input: Tensor,
    output: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    row_length: int,
    eps: float,
    memory_efficient: bool,
    subtract_mean: bool,
    out_dtype: torch.dtype,
) -> Any:
    """The backward launches, planned during the forward pass: autograd's thread runs Python at 0.6 times the speed."""
    if not all(parameter is None or parameter.is_contiguous() for parameter in (weight, bias)):
        return None
    saved = output if memory_efficient else input
    wants_params = any(ctx.needs_input_grad[1:3])
    return backward_plan(
        saved, weight, bias, row_length, eps, subtract_mean, memory_efficient, out_dtype, input.dtype, wants_params
    )


def backward_from_saved(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The backward of every norm's autograd Function: gradients of input, weight and bias."""
    saved, weight, bias, mean, rstd = ctx.saved_tensors
    if ctx.plan is not None and not torch.is_grad_enabled():
        return ctx.plan.run(dy, saved, mean, rstd, weight, bias)
    arguments = (dy, saved, mean, rstd, weight, bias, *ctx.constants, any(ctx.needs_input_grad[1:3]))
    if torch.compiler.is_compiling():
        dx, dweight, dbias = torch.ops.apex.norm_backward(*arguments)
        return dx, none_if_empty(dweight, weight), none_if_empty(dbias, bias)
    if torch.is_grad_enabled():  # create_graph=True: the gradients themselves must be differentiable
        row_length, eps, subtract_mean, memory_efficient, _ = ctx.constants
        if memory_efficient:
            raise RuntimeError(
                "memory_efficient=True keeps only the output of the norm, which is not enough for a second derivative; "
                "use memory_efficient=False where create_graph=True is needed"
            )
        statistics = reference.statistics(saved, row_length, eps, subtract_mean)
        return reference.backward(dy, saved, *statistics, *arguments[4:])
    return norm_backward(*arguments)


class NormFunction(torch.autograd.Function):
    """The autograd node behind `layer_norm` and `rms_norm`; takes checked arguments in `forward_and_save`'s order."""

    forward = staticmethod(_forward_and_save)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        return *backward_from_saved(ctx, dy), None, None, None, None, None


def none_if_empty(gradient: Tensor, parameter: Tensor | None) -> Tensor | None:
    """An operator must return a tensor; an empty one stands for the gradient of nothing."""
    return None if parameter is None or gradient.numel() != parameter.numel() else gradient
