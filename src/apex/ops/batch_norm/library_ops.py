"""`torch.ops.apex.batch_norm_*`: what torch.compile puts into a graph in place of launches."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _library
from . import reference, stages
from .layout import laid_out_like
from .spec import BatchNormSpec, BatchStatistics


def registered(
    input: Tensor,
    z: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
) -> tuple[Tensor, BatchStatistics | None]:
    """The registered operators, which change nothing they are given, and running statistics by PyTorch's."""
    flags = (spec.eps, spec.training, spec.relu, spec.channel_dim)
    if not spec.training:
        return torch.ops.apex.batch_norm_normalise(input, z, running_mean, running_var, weight, bias, *flags), None
    mean, variance = torch.ops.apex.batch_norm_statistics(input.detach(), spec.channel_dim)
    if running_mean is not None and running_var is not None:
        count = input.numel() // input.shape[spec.channel_dim]
        reference.update_running(running_mean, running_var, mean, variance, count, spec.momentum)
    output = torch.ops.apex.batch_norm_normalise(input, z, mean, variance, weight, bias, *flags)
    return output, BatchStatistics(mean, variance, False)


def _statistics(input, channel_dim):
    return stages.local_statistics(input, BatchNormSpec(channel_dim=channel_dim))


def _statistics_fake(input, channel_dim):
    dtype = reference.compute_dtype(input)
    return tuple(input.new_empty((input.shape[channel_dim],), dtype=dtype) for _ in range(2))


def _spec(eps, training, relu, channel_dim):
    return BatchNormSpec(eps, 0.0, training, relu, channel_dim)


def _normalise(input, z, mean, variance, weight, bias, eps, training, relu, channel_dim):
    spec = _spec(eps, training, relu, channel_dim)
    output = stages.normalise(input, z, mean, variance, weight, bias, spec)
    return laid_out_like(torch.empty_like(input), output)


def _normalise_fake(input, z, mean, variance, weight, bias, eps, training, relu, channel_dim):
    return torch.empty_like(input)


def _backward(dy, input, output, mean, variance, weight, bias, eps, training, relu, channel_dim, has_z):
    spec = _spec(eps, training, relu, channel_dim)
    keeps = has_z and relu  # otherwise the addend's gradient is `dy`, which an operator may not return
    dx, dz, dweight, dbias = stages.gradients(dy, input, output, mean, variance, weight, bias, spec, keeps)
    like = torch.empty_like(input)
    dz = dy.new_empty(0) if dz is None else laid_out_like(like, dz)
    return laid_out_like(like, dx), dz, dweight, dbias


def _backward_fake(dy, input, output, mean, variance, weight, bias, eps, training, relu, channel_dim, has_z):
    dz = torch.empty_like(input, dtype=dy.dtype) if has_z and relu else dy.new_empty(0)
    dtype = reference.compute_dtype(dy, input)
    return torch.empty_like(input), dz, *(input.new_empty(mean.shape, dtype=dtype) for _ in range(2))


def _setup_context(ctx, inputs, output):
    input, z, mean, variance, weight, bias, *flags = inputs
    spec = _spec(*flags)
    ctx.spec, ctx.z_dtype = spec, None if z is None else z.dtype
    ctx.save_for_backward(input, output if spec.relu and z is not None else None, mean, variance, weight, bias)


def _op_backward(ctx, dy):
    input, output, mean, variance, weight, bias = ctx.saved_tensors
    spec, wants_z = ctx.spec, ctx.needs_input_grad[1]
    flags = (spec.eps, spec.training, spec.relu, spec.channel_dim)
    dx, dz, dweight, dbias = torch.ops.apex.batch_norm_backward(
        dy, input, output, mean, variance, weight, bias, *flags, wants_z
    )
    dz = (dz if spec.relu else dy).to(ctx.z_dtype) if wants_z else None
    dweight = None if weight is None else dweight.to(weight.dtype)
    dbias = None if bias is None else dbias.to(bias.dtype)
    return dx, dz, None, None, dweight, dbias, None, None, None, None


def _refuse_second_derivative(ctx, *gradients):
    raise RuntimeError(
        "torch.ops.apex.batch_norm_normalise has a first derivative only; apex.ops.batch_norm has a second one"
    )


_library.register_op(
    "batch_norm_statistics(Tensor input, int channel_dim) -> (Tensor, Tensor)", _statistics, _statistics_fake
)
_library.register_op(
    "batch_norm_normalise(Tensor input, Tensor? z, Tensor mean, Tensor variance, Tensor? weight, Tensor? bias, "
    "float eps, bool training, bool relu, int channel_dim) -> Tensor",
    _normalise,
    _normalise_fake,
    backward=_op_backward,
    setup_context=_setup_context,
)
_library.register_op(
    "batch_norm_backward(Tensor dy, Tensor input, Tensor? output, Tensor mean, Tensor variance, Tensor? weight, "
    "Tensor? bias, float eps, bool training, bool relu, int channel_dim, bool has_z) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    backward=_refuse_second_derivative,
    setup_context=lambda ctx, inputs, output: None,
)
