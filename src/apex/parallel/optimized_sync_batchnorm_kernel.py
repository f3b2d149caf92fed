"""The autograd node of SyncBatchNorm."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops._library import once_differentiable
from ..ops.batch_norm import (
    BatchNormSpec,
    gradient_sums,
    gradients,
    normalise,
)
from ..ops.batch_norm.checks import check
from ..ops.batch_norm.joined import joined_plan
from ._joined_norm import joined_forward, joined_gradients, norm_of
from ._statistics import connected, gathered, summed


class SyncBatchnormFunction(torch.autograd.Function):
    """Batch norm over the inputs of all processes of a group, plus `z`, then ReLU with `fuse_relu`.

    With `track_running_stats`, upstream's word for it, statistics are those of the batch, and the running ones, where
    there are any, move towards them by `momentum`; otherwise the running ones are used and nothing is exchanged. The
    gradients of weight and bias are those of this process alone.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        input: Tensor,
        z: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_variance: Tensor | None,
        eps: float,
        track_running_stats: bool = True,
        momentum: float = 1.0,
        process_group: dist.ProcessGroup | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> Tensor:
        spec = BatchNormSpec(eps, momentum, track_running_stats, fuse_relu, -1 if channel_last else 1)
        group = connected(process_group) if track_running_stats else None
        plan = None
        if group is not None:
            plan = joined_plan(input, z, weight, bias, running_mean, running_variance, spec)
        ctx.plan, ctx.group = plan, group
        if plan is not None:
            output, mean, variance = plan.forward(
                input, z, weight, bias, running_mean, running_variance, momentum, lambda packet: gathered(packet, group)
            )
            ctx.save_for_backward(input, output if plan.keeps_output else None, mean, variance, weight, bias)
            return output
        check(input, running_mean, running_variance, weight, bias, z, spec)
        norm = norm_of(input, weight, bias, spec) if track_running_stats else None
        if track_running_stats:
            output, mean, variance = joined_forward(
                input, z, weight, bias, running_mean, running_variance, spec, group, norm
            )
        else:
            assert running_mean is not None  # without statistics of the batch there must be others
            assert running_variance is not None
            mean, variance = running_mean, running_variance
            output = normalise(input, z, mean, variance, weight, bias, spec)
        # Without an addend what ReLU let through is computed again, so that the output need not be kept or read.
        kept = output if spec.relu and z is not None else None
        ctx.save_for_backward(input, kept, mean, variance, weight, bias)
        ctx.spec, ctx.norm, ctx.z_dtype = spec, norm, None if z is None else z.dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor):  # type: ignore[override]
        if ctx.plan is not None:
            return (*_planned_gradients(ctx, grad_output), *(None,) * 8)
        input, output, mean, variance, weight, bias = ctx.saved_tensors
        wants_input, wants_z, wants_weight, wants_bias = ctx.needs_input_grad[:4]
        tensors = (grad_output, input, output, mean, variance, weight, bias, ctx.spec)
        dx: Tensor | None
        dz: Tensor | None
        if not wants_input:  # its own sums are all that a process needs
            dx, (dz, dbias, dweight) = None, gradient_sums(*tensors, wants_z)
        elif ctx.spec.training:
            dx, dz, dbias, dweight, _ = joined_gradients(*tensors, ctx.group, ctx.norm, wants_z)
        else:
            dx, dz, dweight, dbias = gradients(*tensors, wants_z)
        return (
            dx,
            dz.to(ctx.z_dtype) if wants_z and dz is not None else None,
            _as(weight, dweight) if wants_weight else None,
            _as(bias, dbias) if wants_bias else None,
            *(None,) * 8,
        )


def _planned_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Of input, addend, weight and bias."""
    input, output, mean, variance, weight, bias = ctx.saved_tensors
    wants_input, wants_z, wants_weight, wants_bias = ctx.needs_input_grad[:4]
    plan, group = ctx.plan, ctx.group
    given = (dy, input, output, mean, variance, weight, bias)
    dx: Tensor | None
    if wants_input:
        dx, dz, dweight, dbias = plan.gradients(*given, wants_z, lambda packet: summed(packet, group))
    else:  # its own sums are all that a process needs
        dx, (dz, dbias, dweight) = None, gradient_sums(*given, plan.spec, wants_z)
    if dz is not None and dz.dtype != plan.z_dtype:
        dz = dz.to(plan.z_dtype)
    return (
        dx,
        dz,
        _as(weight, dweight) if wants_weight else None,
        _as(bias, dbias) if wants_bias else None,
    )


def _as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient in the dtype of its parameter."""
    return gradient if gradient.dtype is parameter.dtype else gradient.to(parameter.dtype)
