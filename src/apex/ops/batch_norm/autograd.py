"""The autograd nodes of `batch_norm` where kernels run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _library
from . import reference, stages
from .kernel_norm import NormPlan
from .layout import laid_out_like
from .spec import BatchNormSpec


class BatchNormFunction(torch.autograd.Function):
    """The node of a norm without a plan; its arguments were checked, input and `z` are dense."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        input: Tensor,
        z: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        spec: BatchNormSpec,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.set_materialize_grads(False)
        norm = stages.direct_norm(input, weight, bias, spec)
        if spec.training:
            mean, variance = stages.local_statistics(input, spec, running_mean, running_var)
            ctx.mark_non_differentiable(mean, variance)
        else:
            assert running_mean is not None  # checked
            assert running_var is not None
            mean, variance = running_mean.contiguous(), running_var.contiguous()
        if norm is None:
            output = stages.normalise(input, z, mean, variance, weight, bias, spec)
        else:
            output = norm.apply(input, z, mean, variance, weight, bias)
        # Without an addend what ReLU let through is computed again, so that the output need not be kept or read.
        kept = output if spec.relu and z is not None else None
        ctx.save_for_backward(input, kept, mean, variance, weight, bias)
        ctx.spec, ctx.norm, ctx.z_dtype = spec, norm, None if z is None else z.dtype
        return (output, mean, variance) if spec.training else (output, None, None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: None):  # type: ignore[override]
        if dy is None:  # what came behind the norm has no gradient
            return (None,) * 7
        input, output, mean, variance, weight, bias = ctx.saved_tensors
        spec, wants_z = ctx.spec, ctx.needs_input_grad[1]
        dz: Tensor | None
        if torch.is_grad_enabled():  # create_graph=True: the gradients themselves must be differentiable
            dx, dz, dweight, dbias = _differentiable_gradients(dy, input, output, mean, variance, weight, bias, spec)
        elif ctx.norm is None:
            dx, dz, dweight, dbias = stages.gradients(dy, input, output, mean, variance, weight, bias, spec, wants_z)
        else:
            dx, dz, dbias, dweight, _ = ctx.norm.gradients(
                laid_out_like(input, dy), input, output, mean, variance, weight, bias, wants_z
            )
        return (
            dx,
            dz.to(ctx.z_dtype) if wants_z and dz is not None else None,
            None if weight is None else dweight.to(weight.dtype),
            None if bias is None else dbias.to(bias.dtype),
            None,
            None,
            None,
        )


apply_node = _library.quick_apply(BatchNormFunction)


class PlannedBatchNorm(torch.autograd.Function):
    """The node of a norm whose output and statistics were `found` by its plan: one output, and less to ask."""

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
        input, output, mean, variance, weight, bias = ctx.saved_tensors
        plan, wants_z = ctx.plan, ctx.needs_input_grad[1]
        given = (input, output, mean, variance, weight, bias)
        dz: Tensor | None
        if torch.is_grad_enabled():  # create_graph=True: the gradients themselves must be differentiable
            dx, dz, dweight, dbias = _differentiable_gradients(dy, *given, plan.spec)
            dz = dz if wants_z else None
        else:
            dx, dz, dweight, dbias = plan.gradients(wants_z).run(laid_out_like(input, dy), *given)
        if dz is not None and dz.dtype != plan.z_dtype:
            dz = dz.to(plan.z_dtype)
        return dx, dz, _as_parameter(dweight, weight), _as_parameter(dbias, bias), None, None


def _as_parameter(gradient: Tensor, parameter: Tensor | None) -> Tensor | None:
    if parameter is None or gradient.dtype == parameter.dtype:
        return None if parameter is None else gradient
    return gradient.to(parameter.dtype)


apply_planned = _library.quick_apply(PlannedBatchNorm)


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
