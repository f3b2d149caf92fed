"""Batch norm with ReLU, and with an addend and ReLU, of channels-last images at the sizes of a ResNet-50."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ...ops.batch_norm import batch_norm
from ..compiling import compiled
from ..registry import OURS, Call, Case, Expected, Family, Prepared, register

EPS, MOMENTUM = 1e-5, 0.1
# images, channels, side of an image
GPU_SHAPES = ((32, 256, 56), (32, 512, 28), (32, 2048, 7))
CPU_SHAPES = ((8, 64, 56), (8, 256, 28))
# Tensors of the input's size that are read or written at least once, by whether there is an addend.
TENSORS_MOVED = {("fwd", False): 2, ("fwd", True): 3, ("bwd", False): 3, ("bwd", True): 5}


def _eager(x: Tensor, z: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    output = functional.batch_norm(x, mean, variance, weight, bias, True, MOMENTUM, EPS)
    return functional.relu(output if z is None else output + z)


def _ours(x: Tensor, z: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return batch_norm(x, mean, variance, weight, bias, True, MOMENTUM, EPS, z=z, relu=True)


def _prepare(
    dtype: torch.dtype, shape: tuple[int, int, int], addend: bool, direction: str, device: torch.device
) -> Prepared:
    images, channels, side = shape
    generator = torch.Generator(device).manual_seed(0)
    x, addends, gradient = (
        torch.randn(images, channels, side, side, generator=generator, device=device)
        .to(dtype)
        .to(memory_format=torch.channels_last)
        for _ in range(3)
    )
    weight, bias = (torch.rand(channels, generator=generator, device=device).add(0.5) for _ in range(2))
    # On which side of ReLU's kink an element lies may depend on rounding; its gradient would be all or nothing.
    before = functional.batch_norm(x.double(), None, None, weight.double(), bias.double(), training=True)
    before = before + addends if addend else before
    gradient.masked_fill_(before.abs() < (1e-3 if dtype == torch.float32 else 0.05), 0)
    del before
    given = [each.requires_grad_() for each in ((x, addends, weight, bias) if addend else (x, weight, bias))]
    makers: dict[str, Callable[[], Callable[..., Tensor]]] = {OURS: lambda: _ours, "torch": lambda: _eager}
    if device.type == "cuda":
        makers["compile"] = lambda: compiled(_eager, device)

    def arguments(tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        first, second, *rest = tensors
        running = (weight.new_zeros(channels), weight.new_ones(channels))
        return (first, second, *rest, *running) if addend else (first, None, second, *rest, *running)

    def call(maker: Callable[[], Callable[..., Tensor]]) -> Call:
        function = maker()
        own = arguments(given)
        if direction == "fwd":
            return lambda: (function(*own),)
        output = function(*own)
        return lambda: torch.autograd.grad(output, given, gradient, retain_graph=True)

    wide = [each.detach().double().requires_grad_() for each in given]
    exact = arguments(wide)
    output = _eager(*exact[:4], *(None if each is None else each.double() for each in exact[4:]))  # type: ignore[arg-type]
    if direction == "fwd":
        expected = [Expected(output.detach(), dtype)]
    else:
        terms = x.numel() // channels
        gradients = torch.autograd.grad(output, wide, gradient.double())
        expected = [
            Expected(each, leaf.dtype, terms if leaf.dim() == 1 else 1)
            for each, leaf in zip(gradients, given, strict=True)
        ]
    return Prepared({name: functools.partial(call, maker) for name, maker in makers.items()}, expected)


def _case(dtype: torch.dtype, shape: tuple[int, int, int], addend: bool, direction: str) -> Case:
    images, channels, side = shape
    moved = TENSORS_MOVED[direction, addend] * images * channels * side * side * dtype.itemsize
    what = "batch_norm+add+relu" if addend else "batch_norm+relu"
    name = f"{what} {str(dtype).removeprefix('torch.')} {images}x{channels}x{side}x{side} {direction}"
    return Case(name, moved, functools.partial(_prepare, dtype, shape, addend, direction))


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Every shape with and without an addend, in both directions."""
    gpu = device.type == "cuda"
    shapes = GPU_SHAPES if gpu else CPU_SHAPES
    return [
        _case(torch.float16 if gpu else torch.float32, shape, addend, direction)
        for shape in (shapes[:1] if quick else shapes)
        for addend in (False, True)
        for direction in ("fwd", "bwd")
    ]


register(Family("batch_norm", "batch norm with an addend and ReLU, channels last", cases))
