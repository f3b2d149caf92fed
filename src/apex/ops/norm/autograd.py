"""The norms with autograd: one pair of functions behind every norm's `torch.autograd.Function`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _library
from . import reference
from .checks import as_tuple, check_row_length, checked_shape
from .dispatch import norm_backward, norm_forward
from .launches import ForwardPlan
from .plans import plan_for
from .spec import NormSpec


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
    shape = as_tuple(normalized_shape)
    plan = plan_for(input, shape, weight, bias, eps, memory_efficient, subtract_mean, out_dtype)
    if plan is not None:
        return _run_and_save(ctx, input, weight, bias, plan)
    shape = checked_shape(input, shape, weight, bias)
    spec = NormSpec(check_row_length(shape), eps, subtract_mean, memory_efficient)
    return _forward_and_save(ctx, input, weight, bias, spec, out_dtype)


def _run_and_save(ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, plan: ForwardPlan) -> Tensor:
    """The same by kernels."""
    output, statistics = plan.run(input, weight, bias)
    ctx.save_for_backward(output if plan.spec.from_output else input, weight, bias, statistics)
    wanted = ctx.needs_input_grad
    # Planned here, because autograd's thread runs Python at 0.6 times the speed.
    ctx.plan = plan.backward(wanted[1] or wanted[2]) if True in wanted else None
    return output


def _forward_and_save(
    ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, out_dtype: torch.dtype
) -> Tensor:
    """The same where there is no plan, for arguments that were checked before."""
    if torch.compiler.is_compiling():
        output, statistics = torch.ops.apex.norm_forward(input, weight, bias, *spec, out_dtype)
    else:
        output, statistics = norm_forward(input, weight, bias, spec, out_dtype)
        output = output.detach()  # not a view of another tensor, which autograd would not let the caller change
    ctx.save_for_backward(output if spec.from_output else input, weight, bias, statistics)
    ctx.plan, ctx.spec, ctx.input_dtype = None, spec, input.dtype
    return output


def backward_from_saved(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The backward of every norm's autograd Function: gradients of input, weight and bias."""
    saved, weight, bias, statistics = ctx.saved_tensors
    plan = ctx.plan
    if plan is None:
        spec, input_dtype = ctx.spec, ctx.input_dtype
    elif not torch.is_grad_enabled():
        return plan.run(dy, saved, statistics, weight, bias)
    else:
        spec, input_dtype = plan.spec, plan.dx_dtype
    param_grads = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
    if torch.compiler.is_compiling():
        dx, dweight, dbias = torch.ops.apex.norm_backward(
            dy, saved, statistics, weight, bias, *spec, input_dtype, param_grads
        )
        return dx, _library.none_if_empty(dweight, weight), _library.none_if_empty(dbias, bias)
    if torch.is_grad_enabled():  # create_graph=True: the gradients themselves must be differentiable
        if spec.from_output:
            raise RuntimeError(
                "memory_efficient=True keeps only the output of the norm, which is not enough for a second derivative; "
                "use memory_efficient=False where create_graph=True is needed"
            )
        statistics = reference.statistics(saved, spec)
        return reference.backward(dy, saved, statistics, weight, bias, spec, input_dtype, param_grads)
    return norm_backward(dy, saved, statistics, weight, bias, spec, input_dtype, param_grads)


class NormFunction(torch.autograd.Function):
    """The autograd node behind `layer_norm` and `rms_norm`; its arguments were checked, `plan` is for them."""

    @staticmethod
    def forward(ctx, input, weight, bias, spec, out_dtype, plan=None):  # type: ignore[override]
        if plan is not None:
            return _run_and_save(ctx, input, weight, bias, plan)
        return _forward_and_save(ctx, input, weight, bias, spec, out_dtype)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        plan = ctx.plan
        if plan is not None and not torch.is_grad_enabled():  # as below, with a call less
            saved, weight, bias, statistics = ctx.saved_tensors
            dx, dweight, dbias = plan.run(dy, saved, statistics, weight, bias)
            return dx, dweight, dbias, None, None, None
        return *backward_from_saved(ctx, dy), None, None, None
