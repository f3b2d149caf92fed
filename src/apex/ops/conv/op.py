"""Convolution followed by bias, ReLU, mask or a frozen scale: PyTorch's convolution and one pass before and behind it.

Gradients use the output: no gradient flows back where it is 0. The pass that applies this mask also sums the
gradient of the bias. No `Op` declares the pass behind a convolution: it has no derivative apart from the convolution,
which torch.compile must see.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .. import _library
from .._checks import integer
from ..dense.parts import activation_backward, launch_activation_backward, takes_kernel

kernels = _library.LazyModule(f"{__package__}.kernels")

_BLOCK = 1024
_convolution_backward = torch.ops.aten.convolution_backward.default  # looking it up takes as long as a view

Pair = tuple[int, int]


class ConvSpec(NamedTuple):
    """Padding and stride, in both dimensions of an image."""

    padding: int
    stride: int


def conv_bias(input: Tensor, weight: Tensor, bias: Tensor, spec: ConvSpec) -> Tensor:
    """Return the convolution with its bias, which may be [C] or [1, C, 1, 1]."""
    check(input, weight, spec, bias=bias)
    return functional.conv2d(input, weight, bias.reshape(-1), spec.stride, spec.padding)


def conv_bias_relu(
    input: Tensor, weight: Tensor, bias: Tensor, spec: ConvSpec, mask: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """Return relu(conv(input, weight) * scale + bias), without autograd; 0 where `mask`, like the output, is 0."""
    check(input, weight, spec, bias=bias, scale=scale)
    shift: Any = bias if bias.dim() == 1 else bias.reshape(-1)
    padding, stride = spec
    if scale is None and cudnn_does_it(input, weight, bias):
        settings = ((stride, stride), (padding, padding), (1, 1), 1)
        output = torch.cudnn_convolution_relu(input, weight, shift.contiguous(), *settings)
        if mask is None:
            return output
        fused, shift = True, None
    else:
        fused = scale is not None or torch.compiler.is_compiling() or _library.runs_triton(FAMILY, input)
        # If no kernel follows, the convolution adds the bias at less cost.
        output = functional.conv2d(input, weight, None if fused else shift, stride, padding)
        if output.is_meta and input.is_contiguous(memory_format=torch.channels_last):
            # A GPU's result has channels last, while PyTorch gives meta tensors the layout of a CPU's result.
            output = output.contiguous(memory_format=torch.channels_last)
    if mask is not None and (mask.shape != output.shape or mask.device != output.device):
        raise ValueError(
            f"mask has shape {list(mask.shape)} on {mask.device}, the output of the convolution {list(output.shape)} "
            f"on {output.device}"
        )
    if not fused:
        return output.relu_() if mask is None else output.relu_().masked_fill_(mask == 0, 0)
    scale = None if scale is None else scale.reshape(-1)
    if torch.compiler.is_compiling():
        return torch.ops.apex.conv_epilogue(output, scale, shift, mask)
    return _epilogue(output, scale, shift, mask)


def cudnn_does_it(input: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Return whether one call of cuDNN can compute bias and ReLU too, rounding once.

    On an H200 this takes 25 us, where convolution and kernel took 54. The call checks nothing, so tensors that do not
    fit together are left to PyTorch's convolution, which refuses them. PyTorch cannot trace the call with sizes that
    vary, so compiled code does without it.
    """
    return (
        input.is_cuda
        and not torch.compiler.is_compiling()
        and torch.version.hip is None
        and torch.backends.cudnn.enabled
        and weight.dtype == bias.dtype == input.dtype
        and weight.device == input.device
        and input.numel() > 0
        and weight.shape[1] == input.shape[1]
        and _library.runs_triton(FAMILY, input)
    )


def conv_bias_gradients(
    dy: Tensor, input: Tensor, weight: Tensor, spec: ConvSpec, bias_grad: bool, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias [C]; the first two only if they are `wanted`."""
    dbias = _bias_gradient(dy) if bias_grad else None
    return *conv_gradients(dy, input, weight, (spec.padding,) * 2, wanted, spec.stride), dbias


def conv_bias_relu_gradients(
    dy: Tensor,
    output: Tensor,
    input: Tensor,
    weight: Tensor,
    spec: ConvSpec,
    bias_grad: bool,
    wanted: tuple[bool, bool],
    scale: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias from ReLU's output, which is also 0 where a mask was 0."""
    shape = output.shape
    if dy.shape != shape:
        raise ValueError(f"the gradient has shape {list(dy.shape)}, the output {list(shape)}")
    dz, dbias = _relu_backward(dy, output, shape[1], bias_grad)
    if scale is None:
        return *conv_gradients(dz, input, weight, (spec.padding,) * 2, wanted, spec.stride), dbias
    # A factor of an output channel can multiply its weights instead: far fewer numbers.
    factor = scale.reshape(-1, 1, 1, 1)
    dx, dweight = conv_gradients(dz, input, weight * factor, (spec.padding,) * 2, wanted, spec.stride)
    return dx, None if dweight is None else dweight * factor, dbias


def _relu_backward(dy: Tensor, output: Tensor, channels: int, bias_grad: bool) -> tuple[Tensor, Tensor | None]:
    """Return the gradients before ReLU and of the bias."""
    if not output.is_contiguous(memory_format=torch.channels_last):
        dz = torch.ops.aten.threshold_backward(dy, output, 0)
        return dz, _bias_gradient(dz) if bias_grad else None
    if not torch.compiler.is_compiling() and takes_kernel(dy, output):
        if dy.stride() != output.stride():
            dy = torch.empty_like(output).copy_(dy)
        dz, rows = torch.empty_like(output), dy.numel() // channels
        return dz, launch_activation_backward(dy, output, dz, "relu", rows, channels, bias_grad)
    dy_rows, output_rows = (each.movedim(1, -1).reshape(-1, channels) for each in (dy, output))
    dz, dbias = activation_backward(dy_rows, output_rows, "relu", bias_grad)
    return dz.view(output.movedim(1, -1).shape).movedim(-1, 1), dbias


def conv_gradients(
    dz: Tensor, images: Tensor, weight: Tensor, padding: Pair, wanted: tuple[bool, bool], stride: int = 1
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of images and weight, None if they are not `wanted`."""
    if True not in wanted:
        return None, None
    dx, dweight, _ = _convolution_backward(
        dz, images, weight, None, (stride, stride), padding, (1, 1), False, (0, 0), 1, (*wanted, False)
    )
    return dx if wanted[0] else None, dweight if wanted[1] else None


def _bias_gradient(dz: Tensor) -> Tensor:
    return dz.sum((0, 2, 3), dtype=torch.promote_types(dz.dtype, torch.float32)).to(dz.dtype)


def check(input: Tensor, weight: Tensor, spec: ConvSpec, **per_channel: Tensor | None) -> None:
    """Raise for arguments that do not fit together; PyTorch's convolution checks the rest."""
    images, weights, (padding, stride) = input.shape, weight.shape, spec
    if len(images) != 4 or len(weights) != 4:
        raise ValueError(
            f"images [N, C, H, W] and weights [C', C, h, w] are needed, got {list(images)} and {list(weights)}"
        )
    if integer("padding", padding) < 0 or integer("stride", stride) < 1:
        raise ValueError(f"padding={padding}, stride={stride}: at least 0 and 1 are needed")
    if weights[2] > images[2] + 2 * padding or weights[3] > images[3] + 2 * padding:
        raise ValueError(f"weights {list(weights)} reach beyond images {list(images)} with padding={padding}")
    for name, values in per_channel.items():
        if values is None:
            continue
        if values.numel() != weights[0]:
            raise ValueError(
                f"{name} has shape {list(values.shape)}, expected a value for each of {weights[0]} channels"
            )
        if values.device != input.device:
            raise ValueError(f"{name} is on {values.device}, the input on {input.device}")


def _epilogue(output: Tensor, scale: Tensor | None, bias: Tensor | None, mask: Tensor | None) -> Tensor:
    """Apply scale, bias, ReLU and mask in place to a convolution's output; a scale comes with a bias."""
    if (
        output.numel()
        and _library.runs_triton(FAMILY, output)
        and output.is_contiguous(memory_format=torch.channels_last)
    ):
        return launch_epilogue(output, scale, bias, mask)
    shape = (1, -1, 1, 1)
    if scale is None or bias is None:
        output = (output if bias is None else output.add_(bias.reshape(shape))).relu_()
    else:  # in float32, rounded once
        wide = torch.promote_types(output.dtype, torch.float32)
        factor, shift = (each.to(wide).reshape(shape) for each in (scale, bias))
        output = (output.to(wide) * factor + shift).relu_().to(output.dtype)
    return output if mask is None else output.masked_fill_(mask == 0, 0)


def launch_epilogue(output: Tensor, scale: Tensor | None, bias: Tensor | None, mask: Tensor | None) -> Tensor:
    """Launch the epilogue kernel on an output whose channels are last."""
    if mask is not None:
        mask = mask.contiguous(memory_format=torch.channels_last)
        mask = mask.view(torch.int8) if mask.dtype == torch.bool else mask
    scale, bias = (None if each is None else each.contiguous() for each in (scale, bias))
    elements = output.numel()
    kernels.conv_epilogue(
        (-(-elements // _BLOCK),),
        (output, scale, bias, mask),
        (elements, output.shape[1]),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return output


_library.register_op(
    "conv_epilogue(Tensor output, Tensor? scale, Tensor? bias, Tensor? mask) -> Tensor",
    lambda output, scale, bias, mask: _epilogue(output.clone(), scale, bias, mask),
    lambda output, scale, bias, mask: torch.empty_like(output),
)


FAMILY = _library.register_family(
    _library.OpFamily(
        "conv",
        "bias, ReLU, mask and frozen scale behind a convolution",
        small_inputs="PyTorch's operators where channels are not last",
    )
)
