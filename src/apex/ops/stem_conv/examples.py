"""Examples of the first convolution of an image network: a ResNet's stem, and a vision transformer's patches."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.nn import functional

from .._examples import Example, Make
from .op import stem_conv2d


def _example(name: str, window: int, stride: int, padding: int) -> Example:
    def arguments(make: Make, images: int, height: int, width: int, outputs: int) -> dict[str, Any]:
        return {"input": make.image(images, 3, height, width), "weight": make.normal(outputs, 3, window, window)}

    def by_torch(input: Tensor, weight: Tensor) -> Tensor:
        return functional.conv2d(input, weight, None, stride, padding)

    return Example(
        name,
        functools.partial(_call, stride=stride, padding=padding),
        arguments,
        torch=by_torch,
        sizes="images x height x width x outputs",
        small=[(2, 21, 30, 32)],
        terms=lambda images, height, width, outputs: 3 * window * window,
        cancels=True,
    )


def _call(input: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    return stem_conv2d(input, weight, None, stride, padding)


EXAMPLES = [_example("stem_conv", 7, 2, 3), _example("patches", 4, 4, 0)]
