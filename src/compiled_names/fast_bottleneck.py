"""Upstream's compiled module of this name: a bottleneck with frozen batch norms, whole and stage by stage.

The first argument of every function is `nhwc`: whether images and weights are [N, H, W, C] instead of [N, C, H, W].
The lists of tensors are

    inputs of forward stages    x, w1, w2, w3, s1, s2, s3, b1, b2, b3 (, w4, s4, b4 of the shortcut)
    their outputs               out1, out2, y
    inputs of backward stages   x, w1, w2, w3, s1, s2, s3, b1, b2, b3, dy3, dy4, out1, out2 (, w4)
    their outputs               dx, dw1, dw2, dw3 (, dw4)

dy3 and dy4 are the gradients before the last ReLU, times s3 and s4 (times 1 without a shortcut's convolution). A stage
fills its part of `outputs` in place, or returns the input of the next stage. The `halo` functions take rows at the edge
between two ranks: three rows with the edge row in the middle, or ("corr") only the other rank's row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from apex.ops.conv.bottleneck import conv_relu, relu_gradient
from apex.ops.conv.op import Pair, conv_gradients

Tensors = Sequence[Tensor]

_NONE, _BOTH, _COLUMNS = (0, 0), (1, 1), (0, 1)


def _moved(values: Any, source: int, target: int) -> Any:
    """Return the values, with a dimension of every 4-D tensor, also in lists, moved to another position."""
    return tree_map_only(Tensor, lambda each: each.movedim(source, target) if each.dim() == 4 else each, values)


def _stage(function: Callable) -> Callable:
    """Wrap a stage: remove the argument `nhwc`, and convert tensors such that `function` sees [N, C, H, W] only."""

    @functools.wraps(function)
    def run(nhwc: bool, *arguments: Any) -> Any:
        if not nhwc:
            return function(*arguments)
        return _moved(function(*_moved(arguments, -1, 1)), 1, -1)

    return run


def _finished(raw: Tensor, inputs: Tensors) -> Tensor:
    """Apply scale, bias and ReLU after the second convolution."""
    scale, bias = (inputs[place].reshape(1, -1, 1, 1) for place in (5, 8))
    return (raw * scale + bias).relu().to(raw.dtype)


def _scaled(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight * scale.reshape(-1, 1, 1, 1)).to(weight.dtype)


def _conv_relu(images: Tensor, inputs: Tensors, number: int, padding: Pair, summand: Tensor | None = None) -> Tensor:
    """Compute the first, second or third convolution with scale, bias, summand and ReLU."""
    scaled = _scaled(inputs[number], inputs[number + 3])
    return conv_relu(images, scaled, inputs[number + 6].reshape(-1), padding, summand)


def _within(tensor: Tensor, top: Tensor, bottom: Tensor) -> Tensor:
    """Return a mask of the rows from the threshold `top` to the threshold `bottom`."""
    rows = torch.arange(tensor.shape[2], dtype=torch.int32, device=tensor.device).view(-1, 1)
    return (rows >= top.to(rows.device)) & (rows <= bottom.to(rows.device))


def _before(gradient: Tensor, output: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient before ReLU and scale."""
    return relu_gradient(gradient, output) * scale.reshape(1, -1, 1, 1)


def _gradient(kind: str, dz: Tensor, images: Tensor, weight: Tensor, padding: Pair, stride: int = 1) -> Any:
    """Return a convolution's gradient of "data" or of "weight"."""
    return conv_gradients(dz, images, weight, padding, (kind == "data", kind == "weight"), stride)[kind == "weight"]


@_stage
def forward_init(stride: int, inputs: Tensors) -> list[Tensor]:
    """Allocate out1, out2 and y."""
    x = inputs[0]
    (n, _, height, width), last = x.shape, x.is_contiguous(memory_format=torch.channels_last)
    sizes = [(n, weight.shape[0], -(-height // stride), -(-width // stride)) for weight in inputs[1:4]]
    layout = torch.channels_last if last else torch.contiguous_format
    return [torch.empty(size, dtype=x.dtype, device=x.device, memory_format=layout) for size in sizes]


@_stage
def forward_out1(stride: int, inputs: Tensors, outputs: Tensors) -> None:
    """Compute the first convolution."""
    outputs[0].copy_(_conv_relu(inputs[0][:, :, ::stride, ::stride], inputs, 1, _NONE))


@_stage
def forward_out2(stride: int, inputs: Tensors, outputs: Tensors) -> None:
    """Compute the second convolution, with zero padding."""
    outputs[1].copy_(_conv_relu(outputs[0], inputs, 2, _BOTH))


@_stage
def forward_out2_mask(stride: int, inputs: Tensors, outputs: Tensors, top: Tensor, bottom: Tensor) -> None:
    """Compute the second convolution; rows outside of the thresholds get no scale, bias and ReLU."""
    raw = functional.conv2d(outputs[0], inputs[2], padding=1)
    outputs[1].copy_(torch.where(_within(raw, top, bottom), _finished(raw, inputs), raw))


@_stage
def forward_out2_halo(fat_halo: Tensor, inputs: Tensors) -> Tensor:
    """Compute the row of out2 in the middle of three rows of out1."""
    return _conv_relu(fat_halo, inputs, 2, _COLUMNS)


@_stage
def forward_out2_halo_corr(halo: Tensor, inputs: Tensors, w1by3: Tensor, part: Tensor) -> Tensor:
    """Complete an edge row of `forward_out2_mask` with the neighbour's row of out1 and the weights' row for it."""
    return _finished(part + functional.conv2d(halo, w1by3, padding=_COLUMNS), inputs)


@_stage
def forward_out2_pad(stride: int, inputs: Tensors, outputs: Tensors, out1_pad: Tensor) -> None:
    """Compute out2 from out1 padded with a row of each neighbour."""
    outputs[1].copy_(_conv_relu(out1_pad, inputs, 2, _COLUMNS))


@_stage
def forward_rest(stride: int, inputs: Tensors, outputs: Tensors) -> None:
    """Compute y: the third convolution and the shortcut."""
    shortcut = inputs[0][:, :, ::stride, ::stride]
    if len(inputs) > 10:
        w4, s4, b4 = inputs[10:]
        shortcut = functional.conv2d(shortcut, _scaled(w4, s4), b4.reshape(-1))
    outputs[2].copy_(_conv_relu(outputs[1], inputs, 3, _NONE, shortcut))


def forward(nhwc: bool, stride: int, inputs: Tensors) -> list[Tensor]:
    """Run all stages and return out1, out2 and y."""
    outputs = forward_init(nhwc, stride, inputs)
    for stage in (forward_out1, forward_out2, forward_rest):
        stage(nhwc, stride, inputs, outputs)
    return outputs


@_stage
def backward_init(stride: int, inputs: Tensors) -> list[Tensor]:
    """Allocate the gradients."""
    return [torch.empty_like(each) for each in (*inputs[:4], *inputs[14:15])]


@_stage
def backward_grad_out2(stride: int, inputs: Tensors, outputs: Tensors) -> Tensor:
    """Return the gradient of the second convolution's result."""
    return _before(_gradient("data", inputs[10], inputs[13], inputs[3], _NONE), inputs[13], inputs[5])


@_stage
def backward_grad_out1(stride: int, inputs: Tensors, outputs: Tensors, grad_out2: Tensor) -> Tensor:
    """Return the gradient of the first convolution's result, with zero padding of `grad_out2`."""
    return _before(_gradient("data", grad_out2, inputs[12], inputs[2], _BOTH), inputs[12], inputs[4])


@_stage
def backward_grad_out1_mask(
    stride: int, inputs: Tensors, outputs: Tensors, grad_out2: Tensor, top: Tensor, bottom: Tensor
) -> Tensor:
    """Return the gradient of the first convolution's result; rows outside of the thresholds lack ReLU and scale."""
    raw = _gradient("data", grad_out2, inputs[12], inputs[2], _BOTH)
    return torch.where(_within(raw, top, bottom), _before(raw, inputs[12], inputs[4]), raw)


@_stage
def backward_grad_out1_halo(
    stride: int, inputs: Tensors, outputs: Tensors, fat_halo: Tensor, fat_out1: Tensor
) -> Tensor:
    """Return the gradient of the first convolution's result for three rows; only the middle row is complete."""
    return _before(_gradient("data", fat_halo, fat_out1, inputs[2], _BOTH), fat_out1, inputs[4])


@_stage
def backward_grad_out1_halo_corr(
    stride: int, inputs: Tensors, w1by3: Tensor, outputs: Tensors, halo: Tensor, out1: Tensor, part: Tensor
) -> Tensor:
    """Complete an edge row of `backward_grad_out1_mask` with the neighbour's row of the gradient."""
    return _before(part + _gradient("data", halo, out1, w1by3, _COLUMNS), out1, inputs[4])


@_stage
def backward_wgrad2_pad(stride: int, inputs: Tensors, outputs: Tensors, out1_pad: Tensor, grad_out2: Tensor) -> None:
    """Compute the second weight's gradient from out1 padded with a row of each neighbour."""
    outputs[2].copy_(_gradient("weight", grad_out2, out1_pad, inputs[2], _COLUMNS))


@_stage
def backward_wgrad2(stride: int, inputs: Tensors, outputs: Tensors, grad_out2: Tensor) -> None:
    """Compute the second weight's gradient with zero padding of out1."""
    outputs[2].copy_(_gradient("weight", grad_out2, inputs[12], inputs[2], _BOTH))


@_stage
def backward_wgrad2_halo(stride: int, inputs: Tensors, outputs: Tensors, fat_out1: Tensor, halo: Tensor) -> Tensor:
    """Return the part of the second weight's gradient from three rows of out1 and the gradient's middle row."""
    return _gradient("weight", halo, fat_out1, inputs[2], _COLUMNS)


@_stage
def backward_wgrad3(stride: int, inputs: Tensors, outputs: Tensors) -> None:
    """Compute the third weight's gradient."""
    outputs[3].copy_(_gradient("weight", inputs[10], inputs[13], inputs[3], _NONE))


@_stage
def backward_wgrad1(stride: int, inputs: Tensors, outputs: Tensors, grad_out1: Tensor) -> None:
    """Compute the first weight's gradient."""
    outputs[1].copy_(_gradient("weight", grad_out1, inputs[0], inputs[1], _NONE, stride))


@_stage
def backward_rest(stride: int, inputs: Tensors, outputs: Tensors, grad_out2: Tensor, grad_out1: Tensor) -> None:
    """Compute the gradients of x and of the shortcut's weight."""
    x, dx = inputs[0], inputs[11]
    if len(inputs) > 14:
        outputs[4].copy_(_gradient("weight", dx, x, inputs[14], _NONE, stride))
        dx = _gradient("data", dx, x, inputs[14], _NONE, stride)
    outputs[0].copy_(_gradient("data", grad_out1, x, inputs[1], _NONE, stride) + dx)


def backward(nhwc: bool, stride: int, inputs: Tensors) -> list[Tensor]:
    """Run all stages and return the gradients of x and of the weights."""
    outputs = backward_init(nhwc, stride, inputs)
    arguments = (nhwc, stride, inputs, outputs)
    backward_wgrad3(*arguments)
    grad_out2 = backward_grad_out2(*arguments)
    backward_wgrad2(*arguments, grad_out2)
    grad_out1 = backward_grad_out1(*arguments, grad_out2)
    backward_wgrad1(*arguments, grad_out1)
    backward_rest(*arguments, grad_out2, grad_out1)
    return outputs
