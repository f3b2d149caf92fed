"""Shapes of the parameters of whole models, on which optimizer steps are measured."""

from __future__ import annotations

import math
from collections.abc import Callable

Shapes = list[tuple[int, ...]]


def resnet50(width: int = 64, classes: int = 1000) -> Shapes:
    """Return the shapes of torchvision's resnet50: 161 tensors, 25,557,032 elements for a first layer of `width` 64."""
    shapes: Shapes = [(width, 3, 7, 7), (width,), (width,)]
    channels = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = width << stage
        outer = 4 * inner
        for block in range(blocks):
            convolutions = [(inner, channels, 1, 1), (inner, inner, 3, 3), (outer, inner, 1, 1)]
            if block == 0:
                convolutions.append((outer, channels, 1, 1))
            for shape in convolutions:
                shapes += [shape, shape[:1], shape[:1]]
            channels = outer
    return [*shapes, (classes, channels), (classes,)]


def gpt(hidden: int = 2048, layers: int = 24, vocabulary: int = 50257, positions: int = 2048) -> Shapes:
    """Return the shapes of a GPT with tied embeddings and no last norm: 290 tensors, 1,315,719,168 elements."""
    h = hidden
    layer: Shapes = [(h,), (h,), (3 * h, h), (3 * h,), (h, h), (h,), (h,), (h,), (4 * h, h), (4 * h,), (h, 4 * h), (h,)]
    return [(vocabulary, h), (positions, h), *(layer * layers)]


def small_tensors(count: int = 1000) -> Shapes:
    """Return shapes so small that overhead per tensor dominates: 912,000 elements in 1000 tensors."""
    return [[(64,), (32, 32), (256,), (16, 16, 3, 3)][index % 4] for index in range(count)]  # type: ignore[misc]


SETS: dict[str, Callable[[], Shapes]] = {"gpt1.3b": gpt, "resnet50": resnet50, "1000_small": small_tensors}


def elements(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes))
