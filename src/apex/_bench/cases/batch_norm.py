"""Batch norm with ReLU, and with an addend and ReLU, of channels-last images at the sizes of a ResNet-50."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ...ops.batch_norm import batch_norm
from ..directions import Random, case, exact, long_name, prepare, with_peers
from ..registry import Case, Family, Prepared, register

EPS, MOMENTUM = 1e-5, 0.1
# images, channels, side of an image
GPU_SHAPES = ((32, 256, 56), (32, 512, 28), (32, 2048, 7))
CPU_SHAPES = ((8, 64, 56), (8, 256, 28))
# Tensors of the input's size that are read or written at least once, by whether there is an addend.
TENSORS_MOVED = {("fwd", False): 2, ("bwd", False): 3, ("fwd", True): 3, ("bwd", True): 5}


def _eager(x: Tensor, z: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    output = functional.batch_norm(x, mean, variance, weight, bias, True, MOMENTUM, EPS)
    return functional.relu(output if z is None else output + z)


def _ours(x: Tensor, z: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return batch_norm(x, mean, variance, weight, bias, True, MOMENTUM, EPS, z=z, relu=True)


def _prepare(
    dtype: torch.dtype, shape: tuple[int, int, int], addend: bool, direction: str, device: torch.device
) -> Prepared:
    images, channels, side = shape
    random = Random(device)
    x, addends, gradient = (
        random.normal(images, channels, side, side, dtype=dtype, layout=torch.channels_last) for _ in range(3)
    )
    weight, bias = random.weight(channels), random.weight(channels)
    # On which side of ReLU's kink an element lies may depend on rounding; its gradient would be all or nothing.
    before = functional.batch_norm(x.double(), None, None, weight.double(), bias.double(), training=True)
    before = before + addends if addend else before
    gradient.masked_fill_(before.abs() < (1e-3 if dtype == torch.float32 else 0.05), 0)
    del before
    leaves = [each.requires_grad_() for each in (x, addends, weight, bias)]
    arguments = [*leaves, weight.new_zeros(channels), weight.new_ones(channels)]
    if not addend:
        arguments[1] = None  # type: ignore[call-overload]
    pixels = images * side * side
    terms = (1, *([1] if addend else []), 1, pixels, pixels)
    expected = exact(_eager, arguments, gradient, direction, dtype, terms)
    return prepare(with_peers(_ours, _eager, device), arguments, gradient, direction, expected)


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Every shape with and without an addend, in both directions."""
    shapes, dtype = (GPU_SHAPES, torch.float16) if device.type == "cuda" else (CPU_SHAPES, torch.float32)
    found = []
    for shape in shapes[:1] if quick else shapes:
        images, channels, side = shape
        size = images * channels * side * side * dtype.itemsize
        for (way, addend), tensors in TENSORS_MOVED.items():
            what = "batch_norm+add+relu" if addend else "batch_norm+relu"
            name = f"{what} {long_name(dtype)} {images}x{channels}x{side}x{side}"
            found.append(case(name, tensors * size, _prepare, dtype, shape, addend, direction=way))
    return found


register(Family("batch_norm", "batch norm with an addend and ReLU, channels last", cases))
