"""Autograd Functions of convolutions with bias, ReLU, a mask or a frozen scale.

They have upstream's names and arguments, since clients call them by name. `bias` and `scale` have a value per channel,
as [C] or [1, C, 1, 1]. Inside `torch.autocast` (or `apex.amp`) all arguments except the mask are cast to autocast's
dtype. They have a first derivative only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import check_floats, check_tensors
from .._library import cast_for_autocast, once_differentiable
from .op import ConvSpec, conv_bias, conv_bias_gradients, conv_bias_relu, conv_bias_relu_gradients


def _relu_forward(ctx, x, weight, bias, spec: ConvSpec, mask=None, scale=None) -> Tensor:  # type: ignore[no-untyped-def]
    x, weight, bias, scale = cast_for_autocast(x, weight, bias, scale)
    output = conv_bias_relu(x, weight, bias, spec, mask, scale)
    ctx.save_for_backward(x, weight, output, scale)
    ctx.spec, ctx.bias_shape = spec, bias.shape
    return output


def _relu_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight, output, scale = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    needs_bias = needs_bias and scale is None
    needs_grad = (needs_x, needs_weight)
    dx, dweight, dbias = conv_bias_relu_gradients(dy, output, x, weight, ctx.spec, needs_bias, needs_grad, scale)
    if dbias is not None and len(ctx.bias_shape) > 1:
        dbias = dbias.view(ctx.bias_shape)
    return dx, dweight, dbias


class ConvBiasReLU_(torch.autograd.Function):
    """The autograd node of relu(conv(x, weight) + bias)."""

    @staticmethod
    def forward(ctx, x, weight, bias, padding, stride):  # type: ignore[override]
        check_floats(x=x, weight=weight, bias=bias)
        return _relu_forward(ctx, x, weight, bias, ConvSpec(padding, stride))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):  # type: ignore[override]
        return *_relu_backward(ctx, grad_output), None, None


class ConvBiasMaskReLU_(torch.autograd.Function):
    """The autograd node of relu((conv(x, weight) + bias) * mask); the mask has the output's shape, zeros and ones."""

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
    """The autograd node of relu(conv(x, weight) * scale + bias); scale and bias are not trained."""

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
    """The autograd node of conv(x, weight) + bias."""

    @staticmethod
    def forward(ctx, x, weight, bias, padding, stride):  # type: ignore[override]
        x, weight, bias = cast_for_autocast(x, weight, bias)
        ctx.spec, ctx.bias_shape = ConvSpec(padding, stride), bias.shape
        ctx.save_for_backward(x, weight)
        return conv_bias(x, weight, bias, ctx.spec)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx, dweight, dbias = conv_bias_gradients(grad_output, x, weight, ctx.spec, needs_bias, (needs_x, needs_weight))
        return dx, dweight, None if dbias is None else dbias.view(ctx.bias_shape), None, None
