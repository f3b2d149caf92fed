"""A ResNet bottleneck with frozen batch norms (a scale s and a bias b per channel), forward and backward.

    out1 = relu(s1 conv1x1(x) + b1)
    out2 = relu(s2 conv3x3(out1) + b2)
    y    = relu(s3 conv1x1(out2) + b3 + shortcut),    shortcut = x or s4 conv1x1(x) + b4

The scale of an output channel is applied to its weights, so that one call of cuDNN computes the rest of a line and
rounds once. The CPU limits the speed for all but large images, so there are few calls, mostly of the same function,
whose code stays in the CPU's caches. With matrix products for 1x1 convolutions a step on an H200 took 8% longer.

An image may be divided by rows among ranks. A HaloPadder `pad` then exchanges the first and the last row with the ranks
above and below: after `pad.wait()`, `pad(images, *_ROWS)` has the neighbours' rows at both ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import _library
from .op import FAMILY, Pair, conv_gradients, cudnn_does_it

kernels = _library.LazyModule(f"{__package__}.kernels")

_threshold_backward = torch.ops.aten.threshold_backward.default  # looking it up takes as long as a view
_ONE = (1, 1)
_NO_PADDING, _PADDING, _PADDED_ROWS = (0, 0), (1, 1), (0, 1)
_ROWS = (1, False, True)


def bottleneck_reference(
    x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor], stride: int
) -> Tensor:
    """Return y in PyTorch's operators, for torch.compile and torch.func."""
    s, b = ([each.reshape(1, -1, 1, 1) for each in values] for values in (scales, biases))
    out1 = (functional.conv2d(x, weights[0], stride=stride) * s[0] + b[0]).relu()
    out2 = (functional.conv2d(out1, weights[1], padding=1) * s[1] + b[1]).relu()
    shortcut = functional.conv2d(x, weights[3], stride=stride) * s[3] + b[3] if len(weights) > 3 else x
    return (functional.conv2d(out2, weights[2]) * s[2] + b[2] + shortcut).relu()


def bottleneck_forward(
    x: Tensor,
    weights: Sequence[Tensor],
    norms: Sequence[Sequence[Tensor]],
    stride: int,
    pad: Any = None,
    overlap: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Return y and the tensors to save; `overlap` computes the outer rows of out2 again, after the exchange."""
    scaled, scales, bias = fold(weights, norms)
    out1 = conv_relu(x, scaled[0], bias[0], _NO_PADDING, stride=stride)
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
    shortcut, last_bias = x, bias[2]
    if len(weights) > 3:  # both biases are added at once: PyTorch's convolution would need a pass of its own
        shortcut, last_bias = functional.conv2d(x, scaled[3], stride=stride), bias[2] + bias[3]
    y = conv_relu(out2, scaled[2], last_bias, _NO_PADDING, shortcut)
    return y, [x, whole, out2, y, *scaled, *scales]


def bottleneck_backward(
    dy: Tensor, saved: Sequence[Tensor], stride: int, wanted: Sequence[bool], pad: Any = None
) -> list[Tensor | None]:
    """Return the `wanted` gradients of x and of the weights.

    `pad` communicates, so either all ranks or none must want a gradient of x or of the first two weights.
    """
    x, out1, out2, y, *others = saved  # out1 includes the neighbours' rows
    scaled, scales = others[: len(others) // 2], others[len(others) // 2 :]
    of_x, of_weights = wanted[0], wanted[1:]
    of_out1 = of_x or of_weights[0]
    of_out2 = of_out1 or of_weights[1]
    of_scaled: list[Tensor | None] = [None] * len(scaled)
    dz = relu_gradient(dy, y)
    dx: Tensor | None = dz
    if len(scaled) > 3:
        dx, of_scaled[3] = conv_gradients(dz, x, scaled[3], _NO_PADDING, (of_x, of_weights[3]), stride)
    dout2, of_scaled[2] = conv_gradients(dz, out2, scaled[2], _NO_PADDING, (of_out2, of_weights[2]))
    if dout2 is not None:
        dz2 = relu_gradient(dout2, out2)
        if pad is None:
            dout1, of_scaled[1] = conv_gradients(dz2, out1, scaled[1], _PADDING, (of_out1, of_weights[1]))
        else:
            padded = pad(dz2, *_ROWS)  # rows are in transit while the weight's gradient is computed
            _, of_scaled[1] = conv_gradients(dz2, out1, scaled[1], _PADDED_ROWS, (False, of_weights[1]))
            pad.wait()
            dout1, _ = conv_gradients(padded, out1, scaled[1], _PADDING, (of_out1, False))
        if dout1 is not None:
            if pad is not None:
                dout1, out1 = dout1[:, :, 1:-1], out1[:, :, 1:-1]
            dz1 = relu_gradient(dout1, out1)
            dx_of_branch, of_scaled[0] = conv_gradients(dz1, x, scaled[0], _NO_PADDING, (of_x, of_weights[0]), stride)
            dx = None if dx_of_branch is None or dx is None else dx_of_branch.add_(dx)
    pairs = [(each, scale) for each, scale in zip(of_scaled, scales, strict=True) if each is not None]
    if pairs:
        scale_rows(*map(list, zip(*pairs, strict=True)))
    return [dx if of_x else None, *of_scaled]


def scales_and_biases(norms: Sequence[Sequence[Any]]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return scale and bias, [C], of each norm (weight, bias, mean, variance), in its dtype; four launches for all."""
    kinds = list(zip(*norms, strict=True))
    sizes = [each.numel() for each in kinds[0]]
    weight, bias, mean, variance = torch.cat([each for kind in kinds for each in kind]).view(4, -1).unbind()
    scale = weight / variance.sqrt()
    return scale.split(sizes), torch.addcmul(bias, mean, scale, value=-1).split(sizes)


def fold(weights: Sequence[Tensor], norms: Sequence[Sequence[Tensor]]) -> Any:
    """Return scaled weights, scales, and biases [C]; a norm is (weight, bias, mean, variance) or (scale, bias)."""
    scaled = [torch.empty_like(each) for each in weights]
    if len(norms[0]) == 4 and _kernel_takes([*weights, *[each for norm in norms for each in norm]]):
        scales: Any = [torch.empty_like(norm[0]) for norm in norms]
        bias = [torch.empty_like(norm[1], dtype=weights[0].dtype) for norm in norms]
        rows = zip(weights, norms, scaled, scales, bias, strict=True)
        launch_fold([(weight, norm[0], target, *norm[1:], scale, shift) for weight, norm, target, scale, shift in rows])
        return scaled, scales, bias
    scales, biases = scales_and_biases(norms) if len(norms[0]) == 4 else tuple(zip(*norms, strict=True))
    scale_rows(weights, scales, scaled)
    return scaled, scales, [cast(each.reshape(-1), weights[0].dtype) for each in biases]


def scale_rows(tensors: Sequence[Tensor], scales: Sequence[Tensor], targets: Sequence[Tensor] | None = None) -> None:
    """Multiply tensors by the scales of their output channels, rounding once; in place without targets."""
    targets = targets or tensors
    if _kernel_takes([*tensors, *scales]):
        launch_fold([(*each, None, None, None, None, None) for each in zip(tensors, scales, targets, strict=True)])
        return
    for tensor, scale, target in zip(tensors, scales, targets, strict=True):
        target.copy_(tensor * scale.reshape(-1, 1, 1, 1))


def launch_fold(rows: Sequence[tuple[Any, ...]]) -> None:
    """Launch the kernel for up to four rows (weight, gamma, scaled, beta, mean, variance, scale, shift)."""
    sizes = [size for weight, *_ in rows for size in (weight.shape[0], weight.numel() // weight.shape[0])]
    absent = 4 - len(rows)
    kernels.fold_norms(
        (max(sizes[::2]), len(rows)),
        (*[each for row in rows for each in row], *[None] * (8 * absent)),
        (*sizes, *[0] * (2 * absent)),
        BLOCK=512,
        num_warps=4,
    )


def _kernel_takes(tensors: Sequence[Tensor]) -> bool:
    """Return whether the kernel takes these tensors: it needs dense memory on one device."""
    device, last = tensors[0].device, torch.channels_last
    return _library.runs_triton(FAMILY, tensors[0]) and all(
        each.device == device and (each.is_contiguous() or each.is_contiguous(memory_format=last)) for each in tensors
    )


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in a dtype, without a call of PyTorch if it has that dtype already."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def conv_relu(
    images: Tensor, weight: Tensor, bias: Tensor, padding: Pair, summand: Tensor | None = None, stride: int = 1
) -> Tensor:
    """Return relu(conv(images, weight) + bias + summand)."""
    if cudnn_does_it(images, weight, bias):
        strides = (stride, stride)
        if summand is None:
            return torch.cudnn_convolution_relu(images, weight, bias, strides, padding, _ONE, 1)
        return torch.cudnn_convolution_add_relu(images, weight, summand, 1.0, bias, strides, padding, _ONE, 1)
    output = functional.conv2d(images, weight, bias, stride, padding)
    return (output if summand is None else output.add_(summand)).relu_()


def relu_gradient(dy: Tensor, y: Tensor) -> Tensor:
    """Return the gradient before ReLU, from ReLU's output."""
    return _threshold_backward(dy, y, 0)
