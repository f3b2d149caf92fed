"""Group norm with SiLU on channels-last tensors at the sizes of diffusion models, forward and backward apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ...ops.group_norm import group_norm
from ..directions import Random, case, exact, long_name, prepare, with_peers
from ..registry import Case, Family, Prepared, register

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
TENSORS_MOVED = {"fwd": 2, "bwd": 3}


def _eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.silu(functional.group_norm(x, GROUPS, weight, bias, EPS))


def _ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return group_norm(x, GROUPS, weight, bias, EPS, "silu")


def _prepare(dtype: torch.dtype, shape: tuple[int, int, int], direction: str, device: torch.device) -> Prepared:
    images, channels, side = shape
    random = Random(device)
    x, gradient = (
        random.normal(images, channels, side, side, dtype=dtype, layout=torch.channels_last) for _ in range(2)
    )
    leaves = [each.requires_grad_() for each in (x, random.weight(channels, dtype), random.weight(channels, dtype))]
    pixels = images * side * side
    expected = exact(_eager, leaves, gradient, direction, dtype, (1, 1, pixels, pixels))
    return prepare(with_peers(_ours, _eager, device), leaves, gradient, direction, expected)


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Every shape in both directions."""
    shapes, dtype = (GPU_SHAPES, torch.bfloat16) if device.type == "cuda" else (CPU_SHAPES, torch.float32)
    found = []
    for images, channels, side in shapes[:1] if quick else shapes:
        name = f"group_norm+silu {long_name(dtype)} {images}x{channels}x{side}x{side}"
        size = images * channels * side * side * dtype.itemsize
        for way, tensors in TENSORS_MOVED.items():
            found.append(case(name, tensors * size, _prepare, dtype, (images, channels, side), direction=way))
    return found


register(Family("group_norm", "group norm with SiLU, channels last", cases))
