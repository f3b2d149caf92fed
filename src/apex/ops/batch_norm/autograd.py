"""The autograd node of `batch_norm` where kernels run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _library
from . import reference

if TYPE_CHECKING:
    from .norm_plan import NormPlan
    from .spec import BatchNormSpec


class BatchNormFunction(torch.autograd.Function):
    """The node of a norm whose output and statistics were `found` by its plan."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        input: Tensor,
        z: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        plan: NormPlan,
        found: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        output, mean, variance = found
        ctx.save_for_backward(input, output if plan.keeps_output else None, mean, variance, weight, bias)
        ctx.plan = plan
        return output

    @staticmethod
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        saved: tuple[Any, Any, Any, Any, Any, Any] = ctx.saved_tensors
        weight, bias = saved[4:]
        plan, wants_z = ctx.plan, ctx.needs_input_grad[1]
        dz: Tensor | None
        if torch.is_grad_enabled():  # create_graph=True: the gradients themselves must be differentiable
            dx, dz, dweight, dbias = _differentiable_gradients(dy, *saved, plan.spec)
            dz = dz if wants_z else None
        else:
            dx, dz, dweight, dbias = plan.gradients(wants_z).run(dy, *saved)
        if dz is not None and dz.dtype != plan.z_dtype:
            dz = dz.to(plan.z_dtype)
        return dx, dz, _as_parameter(dweight, weight), _as_parameter(dbias, bias), None, None


apply_node = _library.quick_apply(BatchNormFunction)


def _as_parameter(gradient: Tensor, parameter: Tensor | None) -> Tensor | None:
    if parameter is None or gradient.dtype == parameter.dtype:
        return None if parameter is None else gradient
    return gradient.to(parameter.dtype)


def _differentiable_gradients(
    dy: Tensor,
    input: Tensor,
    output: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if spec.training:
        mean, variance = reference.statistics(input, spec)
    if output is None:
        output = reference.apply(input, None, mean, variance, weight, bias, spec)
    gradient, plain, along = reference.sums(dy, input, output.detach(), mean, variance, spec)
    inverse_count = input.shape[spec.channel_dim] / input.numel()
    dx = reference.input_gradient(gradient, input, mean, variance, weight, plain, along, inverse_count, spec)
    return dx, gradient, along, plain
