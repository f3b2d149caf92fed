"""Group norm with SiLU on channels-last tensors at the sizes of diffusion models, forward and backward apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ...ops.group_norm import group_norm
from ..compiling import compiled
from ..registry import OURS, Call, Case, Expected, Family, Prepared, register

GROUPS, EPS = 32, 1e-5
# images, channels, side of an image
GPU_SHAPES = (
    (2, 320, 8),
    (2, 1280, 8),
    (8, 2560, 8),
    (2, 640, 32),
    (8, 1280, 16),
    (8, 2560, 16),
    (2, 320, 64),
    (8, 320, 64),
    (8, 960, 32),
    (8, 640, 64),
    (8, 2560, 64),
)
CPU_SHAPES = ((2, 320, 16), (2, 640, 32))
DTYPES = (torch.bfloat16, torch.float32)
TENSORS_MOVED = {"fwd": 2, "bwd": 3}


def _eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.silu(functional.group_norm(x, GROUPS, weight, bias, EPS))


def _ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return group_norm(x, GROUPS, weight, bias, EPS, "silu")


def _prepare(dtype: torch.dtype, shape: tuple[int, int, int], direction: str, device: torch.device) -> Prepared:
    images, channels, side = shape
    generator = torch.Generator(device).manual_seed(0)
    x, gradient = (
        torch.randn(images, channels, side, side, generator=generator, device=device)
        .to(dtype)
        .to(memory_format=torch.channels_last)
        for _ in range(2)
    )
    parameters = [torch.rand(channels, generator=generator, device=device).add(0.5).to(dtype) for _ in range(2)]
    leaves = (x.requires_grad_(), *(each.requires_grad_() for each in parameters))
    makers: dict[str, Callable[[], Callable[..., Tensor]]] = {OURS: lambda: _ours, "torch": lambda: _eager}
    if device.type == "cuda":
        makers["compile"] = lambda: compiled(_eager, device)

    def call(maker: Callable[[], Callable[..., Tensor]]) -> Call:
        function = maker()
        if direction == "fwd":
            return lambda: (function(*leaves),)
        output = function(*leaves)
        return lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True)

    wide = [each.detach().double().requires_grad_() for each in leaves]
    output = _eager(*wide)
    if direction == "fwd":
        expected = [Expected(output.detach(), dtype)]
    else:
        terms = x.numel() // channels
        gradients = torch.autograd.grad(output, wide, gradient.double())
        expected = [Expected(g, dtype, r) for g, r in zip(gradients, (1, terms, terms), strict=True)]
    return Prepared({name: functools.partial(call, maker) for name, maker in makers.items()}, expected)


def _case(dtype: torch.dtype, shape: tuple[int, int, int], direction: str) -> Case:
    images, channels, side = shape
    moved = TENSORS_MOVED[direction] * images * channels * side * side * dtype.itemsize
    name = f"group_norm+silu {str(dtype).removeprefix('torch.')} {images}x{channels}x{side}x{side} {direction}"
    return Case(name, moved, functools.partial(_prepare, dtype, shape, direction))


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Every shape in both directions."""
    shapes = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    dtypes = DTYPES[:1] if device.type == "cuda" else DTYPES[1:]
    return [_case(d, s, way) for d in dtypes for s in (shapes[:1] if quick else shapes) for way in ("fwd", "bwd")]


register(Family("group_norm", "group norm with SiLU, channels last", cases))
