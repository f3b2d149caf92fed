"""Convolutions of images, followed by bias, ReLU, mask or a frozen scale, as functions.

`bias` and `scale` have a value per channel, as [C] or [1, C, 1, 1]. Inside `torch.autocast` (or `apex.amp`) everything
but a mask is cast to its dtype. Only what PyTorch's operators compute has a second derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops._checks import check_floats, check_tensors
from ...ops._library import autocast_dtype, autocast_off, once_differentiable, quick_apply
from ...ops.conv import (
    ConvSpec,
    conv_bias,
    conv_bias_gradients,
    conv_bias_relu,
    conv_bias_relu_gradients,
    plan_for,
)


def _cast(*tensors: Tensor) -> Sequence[Tensor]:
    dtype = autocast_dtype(tensors[0])
    return tensors if dtype is None else [tensor.to(dtype) for tensor in tensors]


def _back(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return gradient if gradient is None or gradient.dtype == dtype else gradient.to(dtype)


def _relu_forward(
    ctx: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    spec: ConvSpec,
    mask: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    cast_x, cast_weight, cast_bias, *rest = _cast(x, weight, bias, *(() if scale is None else (scale,)))
    cast_scale = rest[0] if rest else None
    with autocast_off(x):
        output = conv_bias_relu(cast_x, cast_weight, cast_bias, spec, mask, cast_scale)
    ctx.save_for_backward(cast_x, cast_weight, output, cast_scale)
    ctx.spec, ctx.dtypes, ctx.bias_shape = spec, (x.dtype, weight.dtype, bias.dtype), bias.shape
    return output


def _relu_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight, output, scale = ctx.saved_tensors
    wanted = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
    bias_grad = scale is None and ctx.needs_input_grad[2]
    with autocast_off(x):
        gradients = conv_bias_relu_gradients(dy, output, x, weight, ctx.spec, bias_grad, wanted, scale)
    dx, dweight, dbias = (_back(each, dtype) for each, dtype in zip(gradients, ctx.dtypes, strict=True))
    return dx, dweight, _shaped(dbias, ctx.bias_shape)


def _shaped(dbias: Tensor | None, shape: torch.Size) -> Tensor | None:
    return dbias if dbias is None or dbias.shape == shape else dbias.view(shape)


class ConvBiasReLU_(torch.autograd.Function):
    """relu(conv(x, weight) + bias)."""

    @staticmethod
    def forward(ctx, x, weight, bias, padding, stride):  # type: ignore[override]
        check_floats(x=x, weight=weight, bias=bias)
        cast_x, cast_weight, cast_bias = _cast(x, weight, bias)
        plan = ctx.plan = plan_for(cast_x, cast_weight, cast_bias, padding, stride)
        if plan is None:
            return _relu_forward(ctx, x, weight, bias, ConvSpec(padding, stride))
        output = plan.run(cast_x, cast_weight, cast_bias)
        ctx.save_for_backward(cast_x, cast_weight, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):  # type: ignore[override]
        plan = ctx.plan
        if plan is None:
            return *_relu_backward(ctx, grad_output), None, None
        x, weight, output = ctx.saved_tensors
        # What was cast, autograd casts back.
        return *plan.gradients(grad_output, output, x, weight, ctx.needs_input_grad), None, None


class ConvBiasMaskReLU_(torch.autograd.Function):
    """relu((conv(x, weight) + bias) * mask), with a mask of zeros and ones of the output's shape."""

    @staticmethod
    def forward(ctx, x, weight, bias, mask, padding, stride):  # type: ignore[override]
        check_floats(x=x, weight=weight, bias=bias)
        check_tensors(mask=mask)
        return _relu_forward(ctx, x, weight, bias, ConvSpec(padding, stride), mask)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):  # type: ignore[override]
        return *_relu_backward(ctx, grad_output), None, None, None


class ConvFrozenScaleBiasReLU_(torch.autograd.Function):
    """relu(conv(x, weight) * scale + bias), with scale and bias that are not trained."""

    @staticmethod
    def forward(ctx, x, weight, scale, bias, padding, stride):  # type: ignore[override]
        check_floats(x=x, weight=weight, scale=scale, bias=bias)
        return _relu_forward(ctx, x, weight, bias, ConvSpec(padding, stride), scale=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):  # type: ignore[override]
        dx, dweight, _ = _relu_backward(ctx, grad_output)
        return dx, dweight, None, None, None, None


class ConvBias_(torch.autograd.Function):
    """conv(x, weight) + bias."""

    @staticmethod
    def forward(ctx, x, weight, bias, padding, stride):  # type: ignore[override]
        cast_x, cast_weight, cast_bias = _cast(x, weight, bias)
        spec = ConvSpec(padding, stride)
        with autocast_off(x):
            output = conv_bias(cast_x, cast_weight, cast_bias, spec)
        ctx.save_for_backward(cast_x, cast_weight)
        ctx.spec, ctx.dtypes, ctx.bias_shape = spec, (x.dtype, weight.dtype, bias.dtype), bias.shape
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        wanted = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        with autocast_off(x):
            gradients = conv_bias_gradients(grad_output, x, weight, ctx.spec, ctx.needs_input_grad[2], wanted)
        dx, dweight, dbias = (_back(each, dtype) for each, dtype in zip(gradients, ctx.dtypes, strict=True))
        return dx, dweight, None if dbias is None else dbias.view(ctx.bias_shape), None, None


ConvBiasReLU = quick_apply(ConvBiasReLU_)
ConvBiasMaskReLU = quick_apply(ConvBiasMaskReLU_)
ConvFrozenScaleBiasReLU = quick_apply(ConvFrozenScaleBiasReLU_)


def ConvBias(x: Tensor, weight: Tensor, bias: Tensor, padding: int, stride: int) -> Tensor:
    """conv(x, weight) + bias: PyTorch's convolution, to which nothing is left to add."""
    check_floats(x=x, weight=weight, bias=bias)
    return conv_bias(x, weight, bias, ConvSpec(padding, stride))
