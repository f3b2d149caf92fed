"""Stages of a batch norm by PyTorch's operators, where everything is of one dtype, float32 or float64.

The formulas are those of `reference`, with fewer passes over memory: values are centred first, so that data far from
zero keeps its digits, and then changed in place. Statistics are not left to PyTorch's batch norm, which adds up float32
with channels last, and is off by 4e-4 in a variance of 0.01 around 1000.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .spec import BatchNormSpec


def fits(input: Tensor, *others: Tensor | None) -> bool:
    """Whether these stages take the tensors: there are elements, and nothing has to be widened."""
    if not input.numel() or input.dtype not in (torch.float32, torch.float64):
        return False
    return all(other is None or other.dtype == input.dtype for other in others)


def statistics(input: Tensor, spec: BatchNormSpec) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every channel."""
    dimensions = tuple(range(input.dim() - 1)) if spec.channel_dim == -1 else (0, *range(2, input.dim()))
    mean = input.mean(dimensions)
    return mean, (input - _spread(mean, input, spec)).square_().mean(dimensions)


def apply(
    input: Tensor,
    z: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
) -> Tensor:
    """The output, given the statistics to normalise by."""
    scale = (variance + spec.eps).rsqrt()
    values = input - _spread(mean, input, spec)
    values.mul_(_spread(scale if weight is None else scale * weight, input, spec))
    if bias is not None:
        values.add_(_spread(bias, input, spec))
    if z is not None:
        values.add_(z)
    return values.relu_() if spec.relu else values


def sums(gradient: Tensor, input: Tensor, mean: Tensor, variance: Tensor, spec: BatchNormSpec) -> tuple[Tensor, Tensor]:
    """Per channel the sum of the gradient, and of it times the normalised input."""
    _, along, plain = torch.ops.aten.native_batch_norm_backward(
        _channels_second(gradient, spec),
        _channels_second(input, spec),
        torch.ones_like(mean),
        mean,
        variance,
        mean,
        (variance + spec.eps).rsqrt(),
        False,
        spec.eps,
        [False, True, True],
    )
    return plain, along


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
    inverse = (variance + spec.eps).rsqrt()
    scale = inverse if weight is None else inverse * weight
    if not spec.training:
        return gradient * _spread(scale, input, spec)
    share = scale * inverse_count
    values = _spread(mean, input, spec) - input
    values.mul_(_spread(along * inverse * share, input, spec))
    values.addcmul_(gradient, _spread(scale, input, spec))
    return values.sub_(_spread(plain * share, input, spec))


def _spread(parameter: Tensor, input: Tensor, spec: BatchNormSpec) -> Tensor:
    return parameter if spec.channel_dim == -1 else parameter.view(-1, *(1,) * (input.dim() - 2))


def _channels_second(tensor: Tensor, spec: BatchNormSpec) -> Tensor:
    """[N, C, ...], without a copy where channels are last and everything before them lies together."""
    if spec.channel_dim == 1:
        return tensor
    return tensor.movedim(-1, 1) if tensor.dim() == 4 else tensor.reshape(-1, tensor.shape[-1])
