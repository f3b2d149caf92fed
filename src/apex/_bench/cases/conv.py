"""Convolution + bias + ReLU at the sizes of ResNet-50, channels last, forward and backward apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ...contrib.conv_bias_relu import ConvBiasReLU
from ..compiling import compiled
from ..registry import OURS, Call, Case, Expected, Family, Prepared, register

# images, channels in and out, side of an image, side of the kernel
GPU_SHAPES = ((32, 64, 256, 56, 1), (32, 128, 128, 28, 3), (32, 512, 2048, 7, 1))
CPU_SHAPES = ((8, 32, 64, 28, 3),)


def _eager(x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
    return functional.relu(functional.conv2d(x, weight, bias, 1, padding))


def _ours(x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
    return ConvBiasReLU(x, weight, bias, padding, 1)


def _prepare(dtype: torch.dtype, shape: tuple[int, ...], direction: str, device: torch.device) -> Prepared:
    images, channels, outputs, side, kernel = shape
    padding = kernel // 2
    generator = torch.Generator(device).manual_seed(0)
    make = lambda *sizes: torch.randn(sizes, generator=generator, device=device)  # noqa: E731
    x, gradient = make(images, channels, side, side), make(images, outputs, side, side)
    weight = make(outputs, channels, kernel, kernel) / (channels * kernel * kernel) ** 0.5
    x, gradient, weight = (each.to(dtype).to(memory_format=torch.channels_last) for each in (x, gradient, weight))
    leaves = tuple(each.requires_grad_() for each in (x, weight, make(outputs).to(dtype)))
    makers: dict[str, Callable[[], Callable[..., Tensor]]] = {OURS: lambda: _ours, "torch": lambda: _eager}
    if device.type == "cuda":
        makers["compile"] = lambda: compiled(_eager, device)

    def call(maker: Callable[[], Callable[..., Tensor]]) -> Call:
        function = maker()
        if direction == "fwd":
            return lambda: (function(*leaves, padding),)
        output = function(*leaves, padding)
        return lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True)

    wide = tuple(each.detach().double().requires_grad_() for each in leaves)
    output = functional.conv2d(wide[0], wide[1], wide[2], 1, padding)
    # On which side of ReLU's kink an element lies may depend on rounding; its gradient would be all or nothing.
    gradient.masked_fill_(output.abs() < (1e-3 if dtype == torch.float32 else 0.05), 0)
    if direction == "fwd":
        expected = [Expected(output.detach().relu_(), dtype, channels * kernel * kernel)]
    else:
        gradients = torch.autograd.grad(output.relu(), wide, gradient.double())
        terms = (outputs * kernel * kernel, images * side * side, images * side * side)
        expected = [Expected(g, dtype, r) for g, r in zip(gradients, terms, strict=True)]
    return Prepared({name: functools.partial(call, maker) for name, maker in makers.items()}, expected)


def _case(dtype: torch.dtype, shape: tuple[int, ...], direction: str) -> Case:
    images, channels, outputs, side, kernel = shape
    inputs, results = images * channels * side * side, images * outputs * side * side
    weights = outputs * channels * kernel * kernel
    moved = inputs + results + weights if direction == "fwd" else 2 * inputs + 2 * results + 2 * weights
    sizes = f"{images}x{channels}x{side}x{side} to {outputs}, kernel {kernel}"
    name = f"conv+bias+relu {str(dtype).removeprefix('torch.')} {sizes} {direction}"
    note = "bytes are those that must move; the products may take longer"
    return Case(name, moved * dtype.itemsize, functools.partial(_prepare, dtype, shape, direction), note=note)


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Every shape in both directions."""
    shapes = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    return [_case(dtype, s, way) for s in (shapes[:1] if quick else shapes) for way in ("fwd", "bwd")]


register(Family("conv", "convolution + bias + ReLU, channels last", cases))
