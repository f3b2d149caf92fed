"""Examples of group norm: channels last with SiLU, as diffusion models have it, and channels first without."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import _examples
from .._examples import Example, Make, Public, Random, Row, Sizes
from .op import group_norm

_LISTED = [
    (2, 320, 8), (2, 1280, 8), (8, 2560, 8), (2, 640, 32), (8, 1280, 16), (8, 2560, 16), (2, 320, 64), (8, 320, 64),
    (8, 960, 32), (8, 640, 64), (8, 2560, 64),
]  # fmt: skip


def _torch(input: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, activation: str) -> Tensor:
    output = functional.group_norm(input, groups, weight, bias, eps)
    return functional.silu(output) if activation else output


def _draw(random: Random) -> Sizes:
    groups = random.choice((8, 16, 32, 32))
    return *random.image(groups, 2560), groups


def _asks(positions: int, group_channels: int, images: int = 0, **_: Any) -> Sizes:
    channels = 32 * group_channels
    return images or max(1, _examples.USUAL_ELEMENTS // (4 * channels * positions)), channels, positions, 1


def _example(name: str, activation: str, channels_last: bool, **others: Any) -> Example:
    def arguments(make: Make, images: int, channels: int, height: int, width: int, groups: int = 0) -> dict[str, Any]:
        input = make.image(images, channels, height, width, channels_last=channels_last)
        weight, bias = make.weight(channels), make.weight(channels)
        return {"input": input, "num_groups": groups or math.gcd(channels, 32), "weight": weight, "bias": bias,
                "eps": 1e-5, "activation": activation}  # fmt: skip

    return Example(
        name,
        group_norm,
        arguments,
        torch=_torch,
        sizes="images x channels x height x width",
        # One program takes a group of the first, several programs a group of the second.
        small=[(2, 60, 5, 7, 6), (2, 24, 70, 70, 3)],
        draw=_draw,
        **others,
    )


EXAMPLES = [
    _example(
        "group_norm",
        "silu",
        True,
        # The sizes of diffusion models.
        large=[(2, channels, side, side, 32) for channels in (320, 960, 1280, 2560) for side in (8, 16, 32, 64)],
        title="group_norm+silu {dtype} {shape}",
        listed=[
            *(Row("cuda", torch.bfloat16, (*shape, shape[-1])) for shape in _LISTED),
            *(Row("cpu", torch.float32, shape) for shape in ((2, 320, 16, 16), (2, 640, 32, 32))),
        ],
        public=[
            Public("contrib.group_norm:GroupNorm", "input", module=lambda *sizes: (sizes[4], sizes[1]), act="silu"),
        ],
        usual=(8, 320, 64, 64),
        asks={
            "group_norm.small_config": _asks,
            "group_norm.cut_config": lambda images, positions, channels, **_: (images, channels, positions, 1),
        },
    ),
    _example(
        "group_norm_nchw",
        "",
        False,
        public=[Public("contrib.group_norm:GroupNorm", "input", module=lambda *sizes: (sizes[4], sizes[1]))],
    ),
]
