"""Group norm in PyTorch operators: any device, any float dtype, any layout, differentiable twice."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._library import compute_dtype
from .._op import laid_out_like


def forward(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor]:
    """Return the output in the input's dtype and layout, and statistics [N, G, 2]: mean and variance."""
    dtype = compute_dtype(input, weight, bias)
    images, channels = input.shape[:2]
    values = input.reshape(images, groups, channels // groups, math.prod(input.shape[2:])).to(dtype)
    mean = values.mean((2, 3), keepdim=True)
    variance = (values - mean).square().mean((2, 3), keepdim=True)
    output = (values - mean) * (variance + eps).rsqrt()
    if weight is not None:
        output = output * weight.to(dtype).reshape(1, groups, -1, 1)
    if bias is not None:
        output = output + bias.to(dtype).reshape(1, groups, -1, 1)
    if silu:
        output = torch.nn.functional.silu(output)
    statistics = torch.cat((mean, variance), 3).squeeze(2).to(compute_dtype(input))
    return laid_out_like(input, output.reshape(input.shape).to(input.dtype)), statistics


def torch_group_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, silu: bool
) -> Tensor:
    """Return PyTorch's group norm, computed in float32 because PyTorch rounds statistics to the input's dtype."""
    dtype = compute_dtype(input, weight, bias)
    wide = input.to(dtype)
    if wide.is_cpu and not wide.requires_grad:
        # PyTorch 2.13 crashes if only the parameters of a channels-last norm are differentiated.
        wide = wide.contiguous()
    weight, bias = (None if parameter is None else parameter.to(dtype) for parameter in (weight, bias))
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)  # without a weight the derivative of PyTorch's operator fails
    output = torch.group_norm(wide, groups, weight, bias, eps)
    if silu:
        output = torch.nn.functional.silu(output)
    output = output.to(input.dtype)
    # On a GPU PyTorch's operator takes channels-last inputs and returns contiguous outputs.
    return output if output.stride() == input.stride() else laid_out_like(input, output)
