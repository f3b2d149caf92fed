"""Group norm in plain PyTorch: any device, any float dtype, any layout, differentiable twice."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .spec import GroupNormSpec


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The widest of the tensors' dtypes, and at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor is not None:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def forward(input: Tensor, weight: Tensor | None, bias: Tensor | None, spec: GroupNormSpec) -> tuple[Tensor, Tensor]:
    """Output in the input's dtype, and statistics [N, G, 2]: mean and variance."""
    dtype = compute_dtype(input, weight, bias)
    values = _grouped(input, spec).to(dtype)
    mean = values.mean((2, 3), keepdim=True)
    variance = (values - mean).square().mean((2, 3), keepdim=True)
    z = _affine((values - mean) * (variance + spec.eps).rsqrt(), weight, bias)
    output = torch.nn.functional.silu(z) if spec.silu else z
    statistics = torch.cat((mean, variance), 3).squeeze(2).to(compute_dtype(input))
    return output.reshape(input.shape).to(input.dtype), statistics


def backward(
    dy: Tensor, input: Tensor, statistics: Tensor, weight: Tensor | None, bias: Tensor | None, spec: GroupNormSpec
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias."""
    dtype = compute_dtype(dy, input, weight, bias)
    mean, variance = statistics.to(dtype)[:, :, None, :].split(1, 3)
    factor = (variance + spec.eps).rsqrt()
    normalised = (_grouped(input, spec).to(dtype) - mean) * factor
    gradient = _grouped(dy, spec).to(dtype)
    if spec.silu:
        z = _affine(normalised, weight, bias)
        sigmoid = z.sigmoid()
        gradient = gradient * sigmoid * (1 + z * (1 - sigmoid))
    dbias = _per_channel(gradient, bias)
    dweight = _per_channel(gradient * normalised, weight)
    scaled = gradient if weight is None else gradient * _like(normalised, weight)
    along = (scaled * normalised).mean((2, 3), keepdim=True)
    dx = factor * (scaled - scaled.mean((2, 3), keepdim=True) - normalised * along)
    return dx.reshape(input.shape).to(input.dtype), dweight, dbias


def _grouped(tensor: Tensor, spec: GroupNormSpec) -> Tensor:
    """[N, G, D, S]."""
    images, channels = tensor.shape[:2]
    return tensor.reshape(images, spec.groups, channels // spec.groups, math.prod(tensor.shape[2:]))


def _like(grouped: Tensor, parameter: Tensor) -> Tensor:
    """A parameter, [C], beside values [N, G, D, S]."""
    return parameter.to(grouped.dtype).reshape(1, *grouped.shape[1:3], 1)


def _affine(normalised: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    z = normalised if weight is None else normalised * _like(normalised, weight)
    return z if bias is None else z + _like(normalised, bias)


def _per_channel(terms: Tensor, parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else terms.sum((0, 3)).reshape(parameter.shape).to(parameter.dtype)
