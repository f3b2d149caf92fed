"""Upstream's compiled module of this name: a bottleneck with frozen batch norms, whole and stage by stage.

Images are [N, C, H, W], or with `nhwc` [N, H, W, C], and weights likewise. The lists are

    inputs of forward stages    x, w1, w2, w3, s1, s2, s3, b1, b2, b3 (, w4, s4, b4 of the shortcut)
    their outputs               out1, out2, y
    inputs of backward stages   x, w1, w2, w3, s1, s2, s3, b1, b2, b3, dy3, dy4, out1, out2 (, w4)
    their outputs               dx, dw1, dw2, dw3 (, dw4)

where dy3 and dy4 are the gradients before the last ReLU, times s3 and s4 (times 1 without a shortcut's convolution). A
stage fills its part of `outputs` in place, or returns what the next one needs. The `halo` functions take rows at the
edge to another rank: three, of which the middle one is at the edge, or ("corr") the other rank's alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from apex.ops.conv.bottleneck import conv_gradients, conv_relu, relu_gradient, times_scale

Tensors = Sequence[Tensor]

_NONE, _BOTH, _COLUMNS = (0, 0), (1, 1), (0, 1)


def _images(tensor: Tensor, nhwc: bool) -> Tensor:
    return tensor.movedim(-1, 1) if nhwc else tensor


def _back(tensor: Tensor, nhwc: bool) -> Tensor:
    return tensor.movedim(1, -1) if nhwc else tensor


def _empty(images: Tensor, shape: Sequence[int], nhwc: bool) -> Tensor:
    """Images of a shape [N, C, H, W] in the layout of others, as `nhwc` has them."""
    last = nhwc or images.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last else torch.contiguous_format
    return _back(torch.empty(tuple(shape), dtype=images.dtype, device=images.device, memory_format=layout), nhwc)


def _activated(images: Tensor, inputs: Tensors, padding: tuple[int, int], nhwc: bool, number: int = 2) -> Tensor:
    """relu(scale * conv + bias) of convolution 1 or 2, as [N, C, H, W]."""
    weight = times_scale(_images(inputs[number], nhwc), inputs[number + 3])
    return conv_relu(images, weight, inputs[number + 6].reshape(-1), padding)


def _within(tensor: Tensor, top: Tensor, bottom: Tensor) -> Tensor:
    """Which rows of [N, C, H, W] the thresholds leave to this rank."""
    rows = torch.arange(tensor.shape[2], dtype=torch.int32, device=tensor.device).view(-1, 1)
    return (rows >= top.to(rows.device)) & (rows <= bottom.to(rows.device))


def _scaled_gradient(gradient: Tensor, output: Tensor, scale: Tensor) -> Tensor:
    """Before ReLU and scale, as [N, C, H, W]."""
    return relu_gradient(gradient, output) * scale.reshape(1, -1, 1, 1)


def _data_gradient(dz: Tensor, like: Tensor, weight: Tensor, padding: tuple[int, int], stride: int = 1) -> Tensor:
    gradient, _ = conv_gradients(dz, like, weight, padding, (True, False), stride)
    assert gradient is not None
    return gradient


def _weight_gradient(
    dz: Tensor, images: Tensor, weight: Tensor, padding: tuple[int, int], nhwc: bool, stride: int = 1
) -> Tensor:
    """All in the caller's layout."""
    dz, images, weight = (_images(each, nhwc) for each in (dz, images, weight))
    _, gradient = conv_gradients(dz, images, weight, padding, (False, True), stride)
    assert gradient is not None
    return _back(gradient, nhwc)


def forward(nhwc: bool, stride: int, inputs: Tensors) -> list[Tensor]:
    """All stages: out1, out2 and y."""
    outputs = forward_init(nhwc, stride, inputs)
    for stage in (forward_out1, forward_out2, forward_rest):
        stage(nhwc, stride, inputs, outputs)
    return outputs


def forward_init(nhwc: bool, stride: int, inputs: Tensors) -> list[Tensor]:
    """Memory for out1, out2 and y."""
    x = _images(inputs[0], nhwc)
    n, _, h, w = x.shape
    channels = (inputs[1].shape[0], inputs[2].shape[0], inputs[3].shape[0])
    height, width = -(-h // stride), -(-w // stride)
    return [_empty(x, (n, each, height, width), nhwc) for each in channels]


def forward_out1(nhwc: bool, stride: int, inputs: Tensors, outputs: Tensors) -> None:
    """The first convolution."""
    pixels = _images(inputs[0], nhwc)[:, :, ::stride, ::stride]
    outputs[0].copy_(_back(_activated(pixels, inputs, _NONE, nhwc, 1), nhwc))


def forward_out2(nhwc: bool, stride: int, inputs: Tensors, outputs: Tensors) -> None:
    """The second one, with zeros around."""
    out1 = _images(outputs[0], nhwc)
    outputs[1].copy_(_back(_activated(out1, inputs, _BOTH, nhwc), nhwc))


def forward_out2_mask(nhwc: bool, stride: int, inputs: Tensors, outputs: Tensors, top: Tensor, bottom: Tensor) -> None:
    """The same; rows before the first threshold and behind the second are left without scale, bias and ReLU."""
    out1, weight = (_images(each, nhwc) for each in (outputs[0], inputs[2]))
    raw = functional.conv2d(out1, weight, padding=1)
    done = torch.where(_within(raw, top, bottom), _finished(raw, inputs), raw)
    outputs[1].copy_(_back(done, nhwc))


def _finished(raw: Tensor, inputs: Tensors) -> Tensor:
    """Scale, bias and ReLU behind the second convolution."""
    scale, bias = (inputs[place].reshape(1, -1, 1, 1) for place in (5, 8))
    return (raw * scale + bias).relu().to(raw.dtype)


def forward_out2_halo(nhwc: bool, fat_halo_y1: Tensor, inputs: Tensors) -> Tensor:
    """The row of out2 in the middle of three rows of out1."""
    rows = _images(fat_halo_y1, nhwc)
    return _back(_activated(rows, inputs, _COLUMNS, nhwc), nhwc)


def forward_out2_halo_corr(
    nhwc: bool, slim_halo_y1: Tensor, inputs: Tensors, w1by3: Tensor, out2_part_halo: Tensor
) -> Tensor:
    """An edge row that `forward_out2_mask` left, with the neighbour's row of out1 and the weights' row for it."""
    row, weight, part = (_images(each, nhwc) for each in (slim_halo_y1, w1by3, out2_part_halo))
    return _back(_finished(part + functional.conv2d(row, weight, padding=_COLUMNS), inputs), nhwc)


def forward_out2_pad(nhwc: bool, stride: int, inputs: Tensors, outputs: Tensors, out1_pad: Tensor) -> None:
    """out2 from out1 with a row of each neighbour."""
    padded = _images(out1_pad, nhwc)
    outputs[1].copy_(_back(_activated(padded, inputs, _COLUMNS, nhwc), nhwc))


def forward_rest(nhwc: bool, stride: int, inputs: Tensors, outputs: Tensors) -> None:
    """The third convolution and the shortcut: y."""
    x, out2, weight = (_images(each, nhwc) for each in (inputs[0], outputs[1], inputs[3]))
    shortcut = x[:, :, ::stride, ::stride]
    if len(inputs) > 10:
        scaled = times_scale(_images(inputs[10], nhwc), inputs[11])
        shortcut = functional.conv2d(shortcut, scaled, inputs[12].reshape(-1))
    y = conv_relu(out2, times_scale(weight, inputs[6]), inputs[9].reshape(-1), _NONE, shortcut)
    outputs[2].copy_(_back(y, nhwc))


def backward(nhwc: bool, stride: int, inputs: Tensors) -> list[Tensor]:
    """All stages: gradients of x and of the weights."""
    outputs = backward_init(nhwc, stride, inputs)
    arguments = (nhwc, stride, inputs, outputs)
    backward_wgrad3(*arguments)
    grad_out2 = backward_grad_out2(*arguments)
    backward_wgrad2(*arguments, grad_out2)
    grad_out1 = backward_grad_out1(*arguments, grad_out2)
    backward_wgrad1(*arguments, grad_out1)
    backward_rest(*arguments, grad_out2, grad_out1)
    return outputs


def backward_init(nhwc: bool, stride: int, inputs: Tensors) -> list[Tensor]:
    """Memory for the gradients."""
    return [torch.empty_like(each) for each in (*inputs[:4], *inputs[14:15])]


def backward_grad_out2(nhwc: bool, stride: int, inputs: Tensors, outputs: Tensors) -> Tensor:
    """The gradient behind the second convolution."""
    dy, out2, weight = (_images(inputs[place], nhwc) for place in (10, 13, 3))
    gradient = _data_gradient(dy, out2, weight, _NONE)
    return _back(_scaled_gradient(gradient, out2, inputs[5]), nhwc)


def backward_grad_out1(nhwc: bool, stride: int, inputs: Tensors, outputs: Tensors, grad_out2: Tensor) -> Tensor:
    """The gradient behind the first convolution, with zeros around `grad_out2`."""
    return backward_grad_out1_halo(nhwc, stride, inputs, outputs, grad_out2, inputs[12])


def backward_grad_out1_mask(
    nhwc: bool, stride: int, inputs: Tensors, outputs: Tensors, grad_out2: Tensor, top: Tensor, bottom: Tensor
) -> Tensor:
    """The same; rows before the first threshold and behind the second are left without ReLU and scale."""
    dz, out1, weight = (_images(each, nhwc) for each in (grad_out2, inputs[12], inputs[2]))
    raw = _data_gradient(dz, out1, weight, _BOTH)
    done = _scaled_gradient(raw, out1, inputs[4])
    return _back(torch.where(_within(raw, top, bottom), done, raw), nhwc)


def backward_grad_out1_halo(
    nhwc: bool, stride: int, inputs: Tensors, outputs: Tensors, grad_out2_halo: Tensor, relu1_halo: Tensor
) -> Tensor:
    """The gradient behind the first convolution for these rows; of three rows the middle one is complete."""
    dz, out1, weight = (_images(each, nhwc) for each in (grad_out2_halo, relu1_halo, inputs[2]))
    return _back(_scaled_gradient(_data_gradient(dz, out1, weight, _BOTH), out1, inputs[4]), nhwc)


def backward_grad_out1_halo_corr(
    nhwc: bool,
    stride: int,
    inputs: Tensors,
    w1by3: Tensor,
    outputs: Tensors,
    grad_out2_halo: Tensor,
    relu1_halo: Tensor,
    part_grad_out1: Tensor,
) -> Tensor:
    """An edge row that `backward_grad_out1_mask` left, with the neighbour's row of the gradient behind it."""
    dz, out1, weight, part = (_images(each, nhwc) for each in (grad_out2_halo, relu1_halo, w1by3, part_grad_out1))
    return _back(_scaled_gradient(part + _data_gradient(dz, out1, weight, _COLUMNS), out1, inputs[4]), nhwc)


def backward_wgrad2_pad(
    nhwc: bool, stride: int, inputs: Tensors, outputs: Tensors, out1_pad: Tensor, grad_out2: Tensor
) -> None:
    """The second weight's gradient, of out1 with a row of each neighbour."""
    outputs[2].copy_(_weight_gradient(grad_out2, out1_pad, inputs[2], _COLUMNS, nhwc))


def backward_wgrad2(nhwc: bool, stride: int, inputs: Tensors, outputs: Tensors, grad_out2: Tensor) -> None:
    """The same with zeros around out1."""
    outputs[2].copy_(_weight_gradient(grad_out2, inputs[12], inputs[2], _BOTH, nhwc))


def backward_wgrad2_halo(
    nhwc: bool, stride: int, inputs: Tensors, outputs: Tensors, input: Tensor, grad_out2_halo: Tensor
) -> Tensor:
    """What three rows of out1 and the gradient's row in their middle add to the second weight's gradient."""
    return _weight_gradient(grad_out2_halo, input, inputs[2], _COLUMNS, nhwc)


def backward_wgrad3(nhwc: bool, stride: int, inputs: Tensors, outputs: Tensors) -> None:
    """The third weight's gradient."""
    outputs[3].copy_(_weight_gradient(inputs[10], inputs[13], inputs[3], _NONE, nhwc))


def backward_wgrad1(nhwc: bool, stride: int, inputs: Tensors, outputs: Tensors, grad_out1: Tensor) -> None:
    """The first weight's gradient."""
    outputs[1].copy_(_weight_gradient(grad_out1, inputs[0], inputs[1], _NONE, nhwc, stride))


def backward_rest(
    nhwc: bool, stride: int, inputs: Tensors, outputs: Tensors, grad_out2: Tensor, grad_out1: Tensor
) -> None:
    """Gradients of x and of the shortcut's weight."""
    x, weight, dz, dx = (_images(each, nhwc) for each in (inputs[0], inputs[1], grad_out1, inputs[11]))
    if len(inputs) > 14:
        outputs[4].copy_(_weight_gradient(inputs[11], inputs[0], inputs[14], _NONE, nhwc, stride))
        dx = _data_gradient(dx, x, _images(inputs[14], nhwc), _NONE, stride)
    outputs[0].copy_(_back(_data_gradient(dz, x, weight, _NONE, stride) + dx, nhwc))
