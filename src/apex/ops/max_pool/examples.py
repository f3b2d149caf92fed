"""Examples of max pooling: the windows of a ResNet's stem, and windows that do not overlap."""

from __future__ import annotations

from typing import Any

from torch.nn import functional

from .._examples import Example, Make
from .op import max_pool2d


def _example(name: str, window: int, stride: int, padding: int) -> Example:
    def arguments(make: Make, images: int, channels: int, height: int, width: int) -> dict[str, Any]:
        input = make.image(images, channels, height, width)
        return {"input": input, "kernel_size": window, "stride": stride, "padding": padding}

    return Example(
        name,
        max_pool2d,
        arguments,
        torch=functional.max_pool2d,
        sizes="images x channels x height x width",
        small=[(2, 24, 9, 11), (1, 3, 12, 12)],
        large=[(16, 64, 112, 112)],
        draw=lambda random: random.image(1, 512),
    )


EXAMPLES = [_example("max_pool", 3, 2, 1), _example("max_pool_apart", 2, 2, 0)]
