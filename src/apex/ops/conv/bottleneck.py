"""A ResNet bottleneck with frozen batch norms, which are a scale s and a bias b for each channel, forward and backward.

    out1 = relu(s1 conv1x1(x) + b1)
    out2 = relu(s2 conv3x3(out1) + b2)
    y    = relu(s3 conv1x1(out2) + b3 + shortcut),    shortcut = x or s4 conv1x1(x) + b4

A scale of an output channel is a factor of its weights, so it is applied to these: one call does the rest of a line,
and rounds once. A 1x1 convolution with a stride sees one of stride * stride pixels, so those are taken first; behind
that nothing has a stride, and with channels last it is a product of matrices, [pixels, C] by [C, C'].

An image may be divided by rows among ranks. A HaloPadder `pad` then exchanges the first and the last row with the ranks
above and below: `pad(images, *_ROWS)` has theirs at both ends after `pad.wait()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..dense.parts import activated_linear
from .op import Pair, conv_gradients, cudnn_does_it

_threshold_backward = torch.ops.aten.threshold_backward.default  # looking it up takes as long as a view
_ONE = (1, 1)
_NO_PADDING, _PADDING, _PADDED_ROWS = (0, 0), (1, 1), (0, 1)
_ROWS = (1, False, True)


def bottleneck_reference(
    x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor], stride: int
) -> Tensor:
    """y in PyTorch's operators, which torch.compile and torch.func see through."""
    s, b = ([each.reshape(1, -1, 1, 1) for each in values] for values in (scales, biases))
    out1 = (functional.conv2d(x, weights[0], stride=stride) * s[0] + b[0]).relu()
    out2 = (functional.conv2d(out1, weights[1], padding=1) * s[1] + b[1]).relu()
    shortcut = functional.conv2d(x, weights[3], stride=stride) * s[3] + b[3] if len(weights) > 3 else x
    return (functional.conv2d(out2, weights[2]) * s[2] + b[2] + shortcut).relu()


def bottleneck_forward(
    x: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    biases: Sequence[Tensor],
    stride: int,
    pad: Any = None,
    overlap: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """y and what the backward pass needs; with `overlap` the outer rows of out2 are computed anew, at the end."""
    pixels = x[:, :, ::stride, ::stride] if stride > 1 else x
    if stride > 1 and x.is_contiguous(memory_format=torch.channels_last):
        pixels = pixels.contiguous(memory_format=torch.channels_last)
    factors = [each.reshape(-1, 1, 1, 1) for each in scales]
    scaled = [cast(each, x.dtype) for each in torch._foreach_mul(list(weights), factors)]
    bias = [cast(each if each.dim() == 1 else each.reshape(-1), x.dtype) for each in biases]
    out1 = conv_relu(pixels, scaled[0], bias[0], _NO_PADDING)
    whole = out1 if pad is None else pad(out1, *_ROWS)
    if pad is None or overlap:
        out2 = conv_relu(out1, scaled[1], bias[1], _PADDING)
    if pad is not None:
        pad.wait()
        if overlap:
            out2[:, :, :1] = conv_relu(whole[:, :, :3], scaled[1], bias[1], _PADDED_ROWS)
            out2[:, :, -1:] = conv_relu(whole[:, :, -3:], scaled[1], bias[1], _PADDED_ROWS)
        else:
            out2 = conv_relu(whole, scaled[1], bias[1], _PADDED_ROWS)
    shortcut = pixels
    if len(weights) > 3:
        conv = pointwise if takes_products(pixels) else functional.conv2d
        shortcut = conv(pixels, scaled[3], bias[3])
    y = conv_relu(out2, scaled[2], bias[2], _NO_PADDING, shortcut)
    return y, [pixels, whole, out2, y, *scaled, *factors]


def bottleneck_backward(
    dy: Tensor, saved: Sequence[Tensor], shape: torch.Size, stride: int, wanted: Sequence[bool], pad: Any = None
) -> list[Tensor | None]:
    """Gradients of x, of `shape`, and of the weights, where `wanted`; all ranks must want one below `out2`, or none."""
    pixels, out1, out2, y, *others = saved  # out1 with the neighbours' rows
    scaled, factors = others[: len(others) // 2], others[len(others) // 2 :]
    of_x, of_weights = wanted[0], wanted[1:]
    of_out1 = of_x or of_weights[0]
    of_out2 = of_out1 or of_weights[1]
    of_scaled: list[Tensor | None] = [None] * len(scaled)
    dz = relu_gradient(dy, y)
    dx: Tensor | None = dz if of_x else None
    if len(scaled) > 3:
        dx, of_scaled[3] = pointwise_gradients(dz, pixels, scaled[3], (of_x, of_weights[3]))
    dout2, of_scaled[2] = pointwise_gradients(dz, out2, scaled[2], (of_out2, of_weights[2]))
    if dout2 is not None:
        dz2 = relu_gradient(dout2, out2)
        if pad is None:
            dout1, of_scaled[1] = conv_gradients(dz2, out1, scaled[1], _PADDING, (of_out1, of_weights[1]))
        else:
            padded = pad(dz2, *_ROWS)  # rows are on their way while the weight's gradient is computed
            _, of_scaled[1] = conv_gradients(dz2, out1, scaled[1], _PADDED_ROWS, (False, of_weights[1]))
            pad.wait()
            dout1, _ = conv_gradients(padded, out1, scaled[1], _PADDING, (of_out1, False))
        if dout1 is not None:
            if pad is not None:
                dout1, out1 = dout1[:, :, 1:-1], out1[:, :, 1:-1]
            dz1 = relu_gradient(dout1, out1)
            dx, of_scaled[0] = pointwise_gradients(dz1, pixels, scaled[0], (of_x, of_weights[0]), dx)
    found = [pair for pair in zip(of_scaled, factors, strict=True) if pair[0] is not None]
    if found:
        torch._foreach_mul_(*map(list, zip(*found, strict=True)))
    return [None if dx is None else at_pixels(dx, shape, stride), *of_scaled]


def at_pixels(gradient: Tensor, shape: torch.Size, stride: int) -> Tensor:
    """The gradient of images of a shape, of which a stride has left a part."""
    if stride == 1:
        return gradient
    layout = torch.channels_last if is_channels_last(gradient) else torch.contiguous_format
    whole = torch.empty(shape, dtype=gradient.dtype, device=gradient.device, memory_format=layout).zero_()
    whole[:, :, ::stride, ::stride] = gradient
    return whole


def scales_and_biases(norms: Sequence[Iterable]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Scale and bias, [C], of each norm (weight, bias, mean, variance), in their dtype; four launches for all."""
    kinds = list(zip(*norms, strict=True))
    sizes = [each.numel() for each in kinds[0]]
    weight, bias, mean, variance = torch.cat([each for kind in kinds for each in kind]).view(4, -1).unbind()
    scale = weight / variance.sqrt()
    return scale.split(sizes), torch.addcmul(bias, mean, scale, value=-1).split(sizes)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype, without a call of PyTorch where it has that."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def takes_products(images: Tensor) -> bool:
    """Whether 1x1 convolutions are products of matrices, half as long to call; float32 has TensorFloat-32 otherwise."""
    return images.dtype != torch.float32 and is_channels_last(images)


def rows_of(images: Tensor) -> Tensor:
    """[pixels, C]; a view where channels are last."""
    channels = images.shape[1]
    images = images.contiguous(memory_format=torch.channels_last)
    return images.as_strided((images.numel() // channels, channels), (channels, 1))


def images_of(rows: Tensor, like: Tensor) -> Tensor:
    """[pixels, C] as images of the height and width of others."""
    (n, _, height, width), channels = like.shape, rows.shape[1]
    return rows.as_strided((n, channels, height, width), (height * width * channels, 1, width * channels, channels))


def pointwise(images: Tensor, weight: Tensor, bias: Tensor, activation: str = "none") -> Tensor:
    """A 1x1 convolution of images that `takes_products`."""
    return images_of(activated_linear(rows_of(images), weight.flatten(1), bias, activation), images)


def conv_relu(images: Tensor, weight: Tensor, bias: Tensor, padding: Pair, summand: Tensor | None = None) -> Tensor:
    """relu(conv(images, weight) + bias + summand)."""
    if summand is None and padding == _NO_PADDING and takes_products(images):
        return pointwise(images, weight, bias, "relu")
    if cudnn_does_it(images, weight, bias):
        if summand is None:
            return torch.cudnn_convolution_relu(images, weight, bias, _ONE, padding, _ONE, 1)
        return torch.cudnn_convolution_add_relu(images, weight, summand, 1.0, bias, _ONE, padding, _ONE, 1)
    output = functional.conv2d(images, weight, bias, padding=padding)
    return (output if summand is None else output.add_(summand)).relu_()


def pointwise_gradients(
    dz: Tensor, images: Tensor, weight: Tensor, wanted: tuple[bool, bool], dx: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """`conv_gradients` of a 1x1 convolution; that of images is added to `dx`, which may be overwritten."""
    if not takes_products(images):
        found, dweight = conv_gradients(dz, images, weight, _NO_PADDING, wanted)
        return found if found is None or dx is None else found.add_(dx), dweight
    rows, matrix = rows_of(dz), weight.flatten(1)
    dweight = rows.t().mm(rows_of(images)).view(weight.shape) if wanted[1] else None
    if not wanted[0]:
        return None, dweight
    return images_of(rows.mm(matrix) if dx is None else rows_of(dx).addmm_(rows, matrix), dz), dweight


def relu_gradient(dy: Tensor, y: Tensor) -> Tensor:
    """The gradient before ReLU, from its result."""
    return _threshold_backward(dy, y, 0)


def is_channels_last(images: Tensor) -> bool:
    return images.is_contiguous(memory_format=torch.channels_last)
