"""Batch norm in plain PyTorch: any device, any float dtype, any layout, differentiable twice.

In the stages that a norm over several processes has between its exchanges: statistics of what is here, `combine`,
`apply`; backward `sums` over what is here, then `input_gradient`, given the sums of all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .spec import BatchNormSpec


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The widest of the tensors' dtypes, and at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor is not None:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def statistics(input: Tensor, spec: BatchNormSpec) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every channel; zeros of an input without elements."""
    values = _channels_last(input, spec).to(compute_dtype(input))
    dimensions = tuple(range(values.dim() - 1))
    count = max(1, values.numel() // max(1, values.shape[-1]))
    mean = values.sum(dimensions) / count
    return mean, (values - mean).square().sum(dimensions) / count


def combine(means: Tensor, variances: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of a whole from those of its parts, [P, C], which have `counts` [P] values each.

    Parts may have no values, and their statistics are zeros, which those of a whole without values are too.
    """
    weights = (counts / counts.sum().clamp(min=1)).to(means.dtype)[:, None]
    mean = (weights * means).sum(0)
    return mean, (weights * (variances + (means - mean).square())).sum(0)


def joined(packets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and sum of squared deviations of every channel of a whole, and how many values it has.

    `packets` [P, 2C + 1] has for each part, which may be empty, its means, sums of squared deviations and number of
    values per channel.
    """
    channels = packets.shape[1] // 2
    means, deviations, counts = packets[:, :channels], packets[:, channels:-1], packets[:, -1:]
    count = counts.sum()
    mean = (counts * means).sum(0) / count.clamp(min=1)
    return mean, (deviations + counts * (means - mean).square()).sum(0), count


def update_running(
    running_mean: Tensor, running_var: Tensor, mean: Tensor, variance: Tensor, count: int, momentum: float
) -> None:
    """Moves running statistics towards those of a batch; the running variance is the unbiased one."""
    unbiased = variance * (count / max(1, count - 1))
    for running, value in ((running_mean, mean), (running_var, unbiased)):
        running.copy_(running.to(value.dtype) * (1 - momentum) + value * momentum)


def apply(
    input: Tensor,
    z: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
) -> Tensor:
    """The output in the input's dtype, given the statistics to normalise by."""
    dtype = compute_dtype(input, weight, bias)
    scale = (variance.to(dtype) + spec.eps).rsqrt()
    values = (_channels_last(input, spec).to(dtype) - mean.to(dtype)) * scale
    if weight is not None:
        values = values * weight.to(dtype)
    if bias is not None:
        values = values + bias.to(dtype)
    if z is not None:
        values = values + _channels_last(z, spec).to(dtype)
    if spec.relu:
        values = values.relu()
    return _channels_back(values.to(input.dtype), spec)


def sums(
    dy: Tensor, input: Tensor, output: Tensor, mean: Tensor, variance: Tensor, spec: BatchNormSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """What ReLU lets through of the gradient; per channel its sum and the sum of it times the normalised input."""
    gradient = torch.where(output > 0, dy, 0) if spec.relu else dy
    dtype = compute_dtype(dy, input)
    wide = _channels_last(gradient, spec).to(dtype)
    normalised = _normalised(input, mean, variance, spec, dtype)
    dimensions = tuple(range(wide.dim() - 1))
    return gradient, wide.sum(dimensions), (wide * normalised).sum(dimensions)


def input_gradient(
    gradient: Tensor,
    input: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    plain: Tensor,
    along: Tensor,
    inverse_count: float | Tensor,
    spec: BatchNormSpec,
) -> Tensor:
    """The input's gradient, given what ReLU let through and its sums over everything that was normalised together."""
    dtype = compute_dtype(gradient, input, weight)
    wide = _channels_last(gradient, spec).to(dtype)
    if spec.training:
        normalised = _normalised(input, mean, variance, spec, dtype)
        wide = wide - plain.to(dtype) * inverse_count - normalised * (along.to(dtype) * inverse_count)
    scale = (variance.to(dtype) + spec.eps).rsqrt()
    scale = scale if weight is None else scale * weight.to(dtype)
    return _channels_back((wide * scale).to(input.dtype), spec)


def _normalised(input: Tensor, mean: Tensor, variance: Tensor, spec: BatchNormSpec, dtype: torch.dtype) -> Tensor:
    centred = _channels_last(input, spec).to(dtype) - mean.to(dtype)
    return centred * (variance.to(dtype) + spec.eps).rsqrt()


def _channels_last(tensor: Tensor, spec: BatchNormSpec) -> Tensor:
    return tensor if spec.channel_dim == -1 else tensor.movedim(1, -1)


def _channels_back(tensor: Tensor, spec: BatchNormSpec) -> Tensor:
    return tensor if spec.channel_dim == -1 else tensor.movedim(-1, 1)
