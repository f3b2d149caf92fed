"""Convolution + bias + ReLU at the sizes of ResNet-50, channels last, forward and backward apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ...contrib.conv_bias_relu import ConvBiasReLU
from ..directions import Random, case, exact, long_name, prepare, with_peers
from ..registry import Case, Family, Prepared, register

# images, channels in and out, side of an image, side of the kernel
GPU_SHAPES = ((32, 64, 256, 56, 1), (32, 128, 128, 28, 3), (32, 512, 2048, 7, 1))
CPU_SHAPES = ((8, 32, 64, 28, 3),)


def _eager(x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
    return functional.relu(functional.conv2d(x, weight, bias, 1, padding))


def _ours(x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
    return ConvBiasReLU(x, weight, bias, padding, 1)


def _prepare(dtype: torch.dtype, shape: tuple[int, ...], direction: str, device: torch.device) -> Prepared:
    images, channels, outputs, side, kernel = shape
    padding, summands, pixels = kernel // 2, channels * kernel * kernel, images * side * side
    random = Random(device)
    x, gradient = random.normal(images, channels, side, side), random.normal(images, outputs, side, side)
    weight = random.normal(outputs, channels, kernel, kernel) / summands**0.5
    x, gradient, weight = (each.to(dtype).to(memory_format=torch.channels_last) for each in (x, gradient, weight))
    leaves = [each.requires_grad_() for each in (x, weight, random.normal(outputs, dtype=dtype))]
    # On which side of ReLU's kink an element lies may depend on rounding; its gradient would be all or nothing.
    x, weight, bias = (each.detach().double() for each in leaves)
    before = functional.conv2d(x, weight, bias, 1, padding)
    gradient.masked_fill_(before.abs() < (1e-3 if dtype == torch.float32 else 0.05), 0)
    arguments = (*leaves, padding)
    terms = (summands, outputs * kernel * kernel, pixels, pixels)
    expected = exact(_eager, arguments, gradient, direction, dtype, terms)
    return prepare(with_peers(_ours, _eager, device), arguments, gradient, direction, expected)


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Every shape in both directions."""
    shapes, dtype = (GPU_SHAPES, torch.float16) if device.type == "cuda" else (CPU_SHAPES, torch.float32)
    note = "bytes are those that must move; the products may take longer"
    found = []
    for shape in shapes[:1] if quick else shapes:
        images, channels, outputs, side, kernel = shape
        moved = (images * (channels + outputs) * side * side + outputs * channels * kernel * kernel) * dtype.itemsize
        sizes = f"{images}x{channels}x{side}x{side} to {outputs}, kernel {kernel}"
        name = f"conv+bias+relu {long_name(dtype)} {sizes}"
        found.append(case(name, moved, _prepare, dtype, shape, direction="fwd", note=note))
        found.append(case(name, 2 * moved, _prepare, dtype, shape, direction="bwd", note=note))
    return found


register(Family("conv", "convolution + bias + ReLU, channels last", cases))
