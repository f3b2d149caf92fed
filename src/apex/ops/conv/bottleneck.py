"""A ResNet bottleneck with frozen batch norms, which are a scale s and a bias b for each channel, forward and backward.

    out1 = relu(s1 conv1x1(x) + b1)
    out2 = relu(s2 conv3x3(out1) + b2)
    y    = relu(s3 conv1x1(out2) + b3 + shortcut),    shortcut = x or s4 conv1x1(x) + b4

A scale of an output channel is a factor of its weights, so it is applied to these: one call of cuDNN does the rest of a
line, and rounds once. A 1x1 convolution with a stride sees one of stride * stride pixels, so those are taken first;
behind that nothing has a stride.

An image may be divided by rows among ranks. `exchange(images)` then starts to send the first and the last row to the
ranks above and below; what it returns waits for theirs and gives (row above, row below), zeros at the outer edges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .op import cudnn_does_it

Exchange = Callable[[Tensor], Callable[[], tuple[Tensor, Tensor]]]

_ONE = (1, 1)
_NO_PADDING, _PADDING, _PADDED_ROWS = (0, 0), (1, 1), (0, 1)


class BottleneckResults(NamedTuple):
    """What the backward pass needs; `pixels` are those of x that the stride leaves, `out1` has the neighbours' rows."""

    pixels: Tensor
    out1: Tensor
    out2: Tensor
    y: Tensor
    scaled_weights: Sequence[Tensor]


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
    exchange: Exchange | None = None,
    overlap: bool = False,
) -> BottleneckResults:
    """All results, without autograd.

    With `overlap` the 3x3 convolution does not wait for the neighbours: its first and last row are computed anew.
    """
    pixels = x[:, :, ::stride, ::stride] if stride > 1 else x
    if stride > 1 and x.is_contiguous(memory_format=torch.channels_last):
        pixels = pixels.contiguous(memory_format=torch.channels_last)
    # One call, where three or four would take the host 10 us each.
    products = torch._foreach_mul(list(weights), [scale.reshape(-1, 1, 1, 1) for scale in scales])
    scaled = [cast(product, x.dtype) for product in products]
    bias = [cast(each if each.dim() == 1 else each.reshape(-1), x.dtype) for each in biases]
    out1 = conv_relu(pixels, scaled[0], bias[0], _NO_PADDING)
    if exchange is None:
        out2 = conv_relu(out1, scaled[1], bias[1], _PADDING)
    else:
        neighbours = exchange(out1)
        if overlap:
            out2 = conv_relu(out1, scaled[1], bias[1], _PADDING)
            out1 = with_rows(out1, *neighbours())
            out2[:, :, :1] = conv_relu(out1[:, :, :3], scaled[1], bias[1], _PADDED_ROWS)
            out2[:, :, -1:] = conv_relu(out1[:, :, -3:], scaled[1], bias[1], _PADDED_ROWS)
        else:
            out1 = with_rows(out1, *neighbours())
            out2 = conv_relu(out1, scaled[1], bias[1], _PADDED_ROWS)
    shortcut, last_bias = pixels, bias[2]
    if len(weights) > 3:  # its bias is added with the other one: PyTorch's convolution would take a pass for it
        shortcut, last_bias = functional.conv2d(pixels, scaled[3]), bias[2] + bias[3]
    y = conv_relu(out2, scaled[2], last_bias, _NO_PADDING, shortcut)
    return BottleneckResults(pixels, out1, out2, y, scaled)


def bottleneck_backward(
    dy: Tensor,
    results: BottleneckResults,
    scales: Sequence[Tensor],
    shape: torch.Size,
    stride: int,
    wanted: Sequence[bool],
    exchange: Exchange | None = None,
) -> list[Tensor | None]:
    """Gradients of x, of `shape`, and of the weights, where they are `wanted`; weights' are sums over this rank's rows.

    Ranks that exchange rows must all ask for a gradient below `out2`, or none.
    """
    pixels, out1, out2, y, scaled = results
    of_x, of_weights = wanted[0], wanted[1:]
    of_out1 = of_x or of_weights[0]
    of_out2 = of_out1 or of_weights[1]
    of_scaled: list[Tensor | None] = [None] * len(scaled)
    dz = relu_gradient(dy, y)
    dx: Tensor | None = dz
    dz1: Tensor | None = None
    dout2, of_scaled[2] = conv_gradients(dz, out2, scaled[2], _NO_PADDING, (of_out2, of_weights[2]))
    if dout2 is not None:
        dz2 = relu_gradient(dout2, out2)
        if exchange is None:
            dout1, of_scaled[1] = conv_gradients(dz2, out1, scaled[1], _PADDING, (of_out1, of_weights[1]))
        else:
            neighbours = exchange(dz2)  # on their way while the weight's gradient is computed
            _, of_scaled[1] = conv_gradients(dz2, out1, scaled[1], _PADDED_ROWS, (False, of_weights[1]))
            padded = with_rows(dz2, *neighbours())
            dout1, _ = conv_gradients(padded, out1, scaled[1], _PADDING, (of_out1, False))
        if dout1 is not None:
            own = slice(None) if exchange is None else slice(1, -1)
            dz1 = relu_gradient(dout1[:, :, own], out1[:, :, own])
            _, of_scaled[0] = conv_gradients(dz1, pixels, scaled[0], _NO_PADDING, (False, of_weights[0]))
    if len(scaled) > 3:
        dx, of_scaled[3] = conv_gradients(dz, pixels, scaled[3], _NO_PADDING, (of_x, of_weights[3]))
    of_input = None
    if dx is not None and dz1 is not None and of_x:
        of_input = at_pixels(add_gradient(dx, dz1, scaled[0]), shape, stride)
    found = [(each, scale) for each, scale in zip(of_scaled, scales, strict=True) if each is not None]
    if found:
        factors: Any = [scale.reshape(-1, 1, 1, 1) for _, scale in found]
        torch._foreach_mul_([each for each, _ in found], factors)
    return [of_input, *of_scaled]


def at_pixels(gradient: Tensor, shape: torch.Size, stride: int) -> Tensor:
    """The gradient of images of a shape, of which a stride has left a part."""
    if stride == 1:
        return gradient
    layout = torch.channels_last if is_channels_last(gradient) else torch.contiguous_format
    whole = torch.empty(shape, dtype=gradient.dtype, device=gradient.device, memory_format=layout).zero_()
    whole[:, :, ::stride, ::stride] = gradient
    return whole


def times_scale(weight: Tensor, scale: Tensor) -> Tensor:
    """A weight with the scales of the output channels, rounded once."""
    return cast(weight * scale.reshape(-1, 1, 1, 1), weight.dtype)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype, without a call of PyTorch where it has that."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def conv_relu(
    images: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int], summand: Tensor | None = None
) -> Tensor:
    """relu(conv(images, weight) + bias + summand)."""
    if cudnn_does_it(images, weight, bias):
        if summand is None:
            return torch.cudnn_convolution_relu(images, weight, bias, _ONE, padding, _ONE, 1)
        return torch.cudnn_convolution_add_relu(images, weight, summand, 1.0, bias, _ONE, padding, _ONE, 1)
    output = functional.conv2d(images, weight, bias, padding=padding)
    return (output if summand is None else output.add_(summand)).relu_()


def conv_gradients(
    dz: Tensor,
    images: Tensor,
    weight: Tensor,
    padding: tuple[int, int],
    wanted: tuple[bool, bool],
    stride: int = 1,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of images and weight, where they are `wanted`."""
    if not any(wanted):
        return None, None
    dx, dweight, _ = torch.ops.aten.convolution_backward.default(
        dz, images, weight, None, (stride, stride), padding, _ONE, False, (0, 0), 1, (*wanted, False)
    )
    return dx if wanted[0] else None, dweight if wanted[1] else None


def relu_gradient(dy: Tensor, y: Tensor) -> Tensor:
    """The gradient before ReLU, from its result."""
    return torch.ops.aten.threshold_backward.default(dy, y, 0)


def add_gradient(dx: Tensor, dz: Tensor, weight: Tensor) -> Tensor:
    """dx plus the gradient behind a 1x1 convolution; may overwrite dx."""
    # A product of matrices then, which adds its result; in float32 convolutions are quicker, by TensorFloat-32.
    if dx.dtype != torch.float32 and is_channels_last(dx) and is_channels_last(dz):
        rows, gradients = (each.movedim(1, -1).view(-1, each.shape[1]) for each in (dx, dz))
        rows.addmm_(gradients, weight.reshape(weight.shape[:2]))
        return dx
    return functional.conv_transpose2d(dz, weight).add_(dx)


def is_channels_last(images: Tensor) -> bool:
    return images.is_contiguous(memory_format=torch.channels_last)


def with_rows(images: Tensor, above: Tensor, below: Tensor) -> Tensor:
    """Images with a row more at each end, in the layout that they have."""
    padded = functional.pad(images, (0, 0, 1, 1))
    padded[:, :, :1], padded[:, :, -1:] = above, below
    return padded
