"""Upstream's compiled module of this name: the steps of a batch norm over several processes, without autograd.

Inputs are [N, C, ...], those of functions with `c_last` in their name [N, ..., C]. Statistics are float32 beside half
precision: mean and biased variance, or one over the standard deviation, to which eps was added.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from apex.ops.batch_norm import (
    BatchNormSpec,
    Channels,
    GradientSums,
    gradient_sums,
    input_gradient,
    normalise,
    statistics,
)
from apex.ops.batch_norm.reference import combine

# One over the deviation is given, and the callers' eps is in it. What is left of ours changes no variance and keeps
# kernels, whose tiles may be wider than the channels, from dividing by zero there.
_FIRST = BatchNormSpec(eps=1e-30)
_LAST = BatchNormSpec(eps=1e-30, channel_dim=-1)


# Functions of two layouts say by `spec` which one; their forms with `_c_last` take the same arguments, channels last.


def welford_mean_var(input: Tensor, *, spec: BatchNormSpec = _FIRST) -> list[Tensor]:
    """[mean, biased variance] of every channel."""
    return list(statistics(input, spec))


def welford_mean_var_c_last(input: Tensor) -> list[Tensor]:
    """As `welford_mean_var`."""
    return welford_mean_var(input, spec=_LAST)


def welford_parallel(
    mean_feature_nodes: Tensor, var_biased_feature_nodes: Tensor, numel: Tensor, eps: float
) -> list[Tensor]:
    """[mean, unbiased variance, one over the deviation] from those [P, C] of P parts of `numel` [P] values each."""
    counts = numel.view(-1, 1).to(mean_feature_nodes.dtype)
    mean, variance = combine(torch.cat((mean_feature_nodes, var_biased_feature_nodes * counts, counts), 1))
    total = numel.sum()
    unbiased = variance * (total / (total - 1).clamp(min=1)).to(variance.dtype)
    return [mean, unbiased, (variance + eps).rsqrt()]


def batchnorm_forward(
    input: Tensor, mean: Tensor, inv_std: Tensor, weight: Tensor | None, shift: Tensor | None
) -> Tensor:
    """The output, in the dtype of the input."""
    return normalise(input, None, _channels(mean, inv_std, weight, shift), _FIRST)


def batchnorm_forward_c_last(input, z, mean, inv_std, weight, shift, fuse_relu) -> Tensor:
    """The output plus `z`, then ReLU with `fuse_relu`."""
    return normalise(input, z, _channels(mean, inv_std, weight, shift), _LAST._replace(relu=fuse_relu))


def reduce_bn(grad_output, input, mean, inv_std, weight, *, spec=_FIRST) -> list[Tensor]:
    """[sum of the gradient, sum of it times (input - mean), gradient of weight, of bias]; empty without a weight."""
    _, sum_dy, sum_dy_xhat, _ = gradient_sums(grad_output, input, None, _channels(mean, inv_std, weight), spec)
    if weight is None:
        return [sum_dy, sum_dy_xhat / inv_std, mean.new_empty(0), mean.new_empty(0)]
    return [sum_dy, sum_dy_xhat / inv_std, sum_dy_xhat.to(weight.dtype), sum_dy.to(weight.dtype)]


def reduce_bn_c_last(*arguments: Any, **named: Any) -> list[Tensor]:
    """As `reduce_bn`."""
    return reduce_bn(*arguments, **named, spec=_LAST)


def batchnorm_backward(grad_output, input, mean, inv_std, weight, sum_dy, sum_dy_xmu, count, *, spec=_FIRST) -> Tensor:
    """The gradient of the input, given the sums over all processes and how many values each of them has."""
    total = count.sum().clamp(min=1)
    means = GradientSums(sum_dy / total, sum_dy_xmu * inv_std / total, 1.0)
    return input_gradient(grad_output, input, None, _channels(mean, inv_std, weight), means, spec)


def batchnorm_backward_c_last(*arguments: Any, **named: Any) -> Tensor:
    """As `batchnorm_backward`."""
    return batchnorm_backward(*arguments, **named, spec=_LAST)


def relu_bw_c_last(grad_output, input, z, mean, inv_std, weight, shift) -> Tensor:
    """The gradient behind the mask of ReLU, which follows the norm and the addend `z`."""
    output = normalise(input, z, _channels(mean, inv_std, weight, shift), _LAST._replace(relu=True))
    return torch.where(output > 0, grad_output, 0)


def _channels(mean: Tensor, inv_std: Tensor, weight: Tensor | None, shift: Tensor | None = None) -> Channels:
    return Channels(mean, inv_std.square().reciprocal(), weight, shift)
