"""Upstream's compiled module of this name: the steps of a batch norm over several processes, without autograd.

Inputs are [N, C, ...], or [N, ..., C] for functions with `c_last` in their name. Statistics of half-precision inputs
are float32: mean and biased variance, or one over the standard deviation, which includes eps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from apex.ops.batch_norm import (
    BatchNormSpec,
    Channels,
    GradientSums,
    input_gradient,
    local_gradients,
    normalise,
    statistics,
)
from apex.ops.batch_norm.reference import combine

# Callers pass one over the deviation, which includes their eps. This eps is too small to change a variance; it keeps
# kernels, whose tiles may be wider than the channels, from dividing by zero.
_FIRST = BatchNormSpec(eps=1e-30)
_LAST = BatchNormSpec(eps=1e-30, channel_dim=-1)


# `spec` selects the layout of these functions; their variants with `_c_last` have the same arguments, channels last.


def welford_mean_var(input: Tensor, *, spec: BatchNormSpec = _FIRST) -> list[Tensor]:
    """Return [mean, biased variance] of every channel."""
    return list(statistics(input, spec))


def welford_mean_var_c_last(input: Tensor) -> list[Tensor]:
    """Return [mean, biased variance] of every channel of a channels-last input."""
    return welford_mean_var(input, spec=_LAST)


def welford_parallel(
    mean_feature_nodes: Tensor, var_biased_feature_nodes: Tensor, numel: Tensor, eps: float
) -> list[Tensor]:
    """Combine statistics [P, C] of P parts of `numel` [P] values: [mean, unbiased variance, one over the deviation]."""
    counts = numel.view(-1, 1).to(mean_feature_nodes.dtype)
    mean, variance = combine(torch.cat((mean_feature_nodes, var_biased_feature_nodes * counts, counts), 1))
    total = numel.sum()
    unbiased = variance * (total / (total - 1).clamp(min=1)).to(variance.dtype)
    return [mean, unbiased, (variance + eps).rsqrt()]


def batchnorm_forward(
    input: Tensor, mean: Tensor, inv_std: Tensor, weight: Tensor | None, shift: Tensor | None
) -> Tensor:
    """Return the normalised input, in its dtype."""
    return normalise(input, None, _channels(mean, inv_std, weight, shift), _FIRST)


def batchnorm_forward_c_last(input, z, mean, inv_std, weight, shift, fuse_relu) -> Tensor:
    """Return the normalised channels-last input plus `z`, after ReLU if `fuse_relu`."""
    return normalise(input, z, _channels(mean, inv_std, weight, shift), _LAST._replace(relu=fuse_relu))


def reduce_bn(grad_output, input, mean, inv_std, weight, *, spec=_FIRST) -> list[Tensor]:
    """Return [sum_dy, sum of dy * (input - mean), gradient of weight, of bias]; the last two are empty without one."""
    channels = _channels(mean, inv_std, weight)
    *_, sum_dy_xhat, sum_dy = local_gradients(grad_output, input, None, channels, spec, False, False)
    if weight is None:
        return [sum_dy, sum_dy_xhat / inv_std, mean.new_empty(0), mean.new_empty(0)]
    return [sum_dy, sum_dy_xhat / inv_std, sum_dy_xhat.to(weight.dtype), sum_dy.to(weight.dtype)]


def reduce_bn_c_last(*arguments: Any, **named: Any) -> list[Tensor]:
    """Call `reduce_bn` for a channels-last input."""
    return reduce_bn(*arguments, **named, spec=_LAST)


def batchnorm_backward(grad_output, input, mean, inv_std, weight, sum_dy, sum_dy_xmu, count, *, spec=_FIRST) -> Tensor:
    """Return the gradient of the input from the sums over all processes and the number of values of each process."""
    total = count.sum().clamp(min=1)
    means = GradientSums(sum_dy / total, sum_dy_xmu * inv_std / total, 1.0)
    return input_gradient(grad_output, input, None, _channels(mean, inv_std, weight), means, spec)


def batchnorm_backward_c_last(*arguments: Any, **named: Any) -> Tensor:
    """Call `batchnorm_backward` for a channels-last input."""
    return batchnorm_backward(*arguments, **named, spec=_LAST)


def relu_bw_c_last(grad_output, input, z, mean, inv_std, weight, shift) -> Tensor:
    """Return the gradient masked by ReLU, which follows the norm and the addend `z`."""
    output = normalise(input, z, _channels(mean, inv_std, weight, shift), _LAST._replace(relu=True))
    return torch.where(output > 0, grad_output, 0)


def _channels(mean: Tensor, inv_std: Tensor, weight: Tensor | None, shift: Tensor | None = None) -> Channels:
    return Channels(mean, inv_std.square().reciprocal(), weight, shift)
