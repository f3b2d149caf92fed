"""Upstream's compiled module of this name: convolutions with bias, mask, scale and ReLU, on lists of tensors."""

from __future__ import annotations

from torch import Tensor

from apex.ops.conv import ConvSpec, conv_bias, conv_bias_gradients, conv_bias_relu, conv_bias_relu_gradients

_BOTH = (True, True)


def forward(inputs: list[Tensor], padding: int, stride: int) -> list[Tensor]:
    """Map [x, weight, bias] to [relu(conv + bias)]."""
    x, weight, bias = inputs
    return [conv_bias_relu(x, weight, bias, ConvSpec(padding, stride))]


def backward(inputs: list[Tensor], padding: int, stride: int) -> list[Tensor | None]:
    """Map [x, weight, output, gradient] to the gradients of [x, weight, bias]; for `forward` and `forward_mask`."""
    x, weight, output, dy = inputs
    gradients = conv_bias_relu_gradients(dy, output, x, weight, ConvSpec(padding, stride), True, _BOTH)
    return _shaped(gradients)


def forward_no_relu(inputs: list[Tensor], padding: int, stride: int) -> list[Tensor]:
    """Map [x, weight, bias] to [conv + bias]."""
    x, weight, bias = inputs
    return [conv_bias(x, weight, bias, ConvSpec(padding, stride))]


def backward_no_relu(inputs: list[Tensor], padding: int, stride: int) -> list[Tensor | None]:
    """Map [x, weight, gradient] to the gradients of [x, weight, bias]."""
    x, weight, dy = inputs
    return _shaped(conv_bias_gradients(dy, x, weight, ConvSpec(padding, stride), True, _BOTH))


def forward_mask(inputs: list[Tensor], padding: int, stride: int) -> list[Tensor]:
    """Map [x, weight, bias, mask] to [relu((conv + bias) * mask)]."""
    x, weight, bias, mask = inputs
    return [conv_bias_relu(x, weight, bias, ConvSpec(padding, stride), mask)]


def forward_cscale_cbias_relu(inputs: list[Tensor], padding: int, stride: int) -> list[Tensor]:
    """Map [x, weight, scale, bias] to [relu(conv * scale + bias)]."""
    x, weight, scale, bias = inputs
    return [conv_bias_relu(x, weight, bias, ConvSpec(padding, stride), scale=scale)]


def backward_cscale_cbias_relu(inputs: list[Tensor], padding: int, stride: int) -> list[Tensor | None]:
    """Map [x, weight, scale, output, gradient] to the gradients of [x, weight]."""
    x, weight, scale, output, dy = inputs
    spec = ConvSpec(padding, stride)
    return list(conv_bias_relu_gradients(dy, output, x, weight, spec, False, _BOTH, scale)[:2])


def _shaped(gradients: tuple[Tensor | None, Tensor | None, Tensor | None]) -> list[Tensor | None]:
    dx, dweight, dbias = gradients
    return [dx, dweight, dbias.view(1, -1, 1, 1)]
