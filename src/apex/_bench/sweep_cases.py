"""Random cases of each family for `apex bench --sweep`: shapes, dtypes, strides and alignments that models have.

A family is a function of a `Draw` and a device. It returns a case's name and a function that makes its passes, "fwd"
and "bwd".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..ops import _tolerance
from ..ops._examples import Random
from .cases import optimizers
from .directions import compared, long_name, times
from .examples import sweeps
from .list_passes import PASSES
from .problems import make_parameters, prepared_steps
from .registry import Prepared

Passes = dict[str, Prepared]
Drawn = tuple[str, Callable[[], Passes]]


class Draw(Random):
    """Random numbers of one case, and its tensors."""

    def layout(self, dimensions: int = 0) -> str:
        """Draw a layout: mostly contiguous, else a slice of wider rows, offset by an element, or transposed."""
        others = ["sliced", "oddly sliced", "offset"] + ["transposed"] * (dimensions > 2)
        return self.choice(others) if self.random() < 0.2 else ""

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, layout: str = "") -> Tensor:
        """Return normal values in the memory layout `layout`."""
        generator = torch.Generator(device).manual_seed(self.getrandbits(32))
        outer, last, first = list(shape[:-1]), shape[-1], int(layout == "offset")
        if layout == "transposed":
            outer[:2] = outer[1::-1]
        width = last + {"sliced": 64, "oddly sliced": 3}.get(layout, 0)
        values = torch.randn(math.prod(outer) * width + first, generator=generator, device=device).to(dtype)
        values = values[first:].view(*outer, width)[..., :last]
        return values.transpose(0, 1) if layout == "transposed" else values


def _name(dtype: torch.dtype, shape: Sequence[int], *words: object) -> str:
    described = [str(word).removeprefix("torch.") for word in words if word]
    return " ".join([long_name(dtype), times(shape), *described])


def _both(prepare: Callable[[str], Prepared]) -> Passes:
    """Prepare forward and backward of a case; compilers and Liger-Kernel are not timed.

    The tolerance also allows errors relative to the typical size of the values, whose rounding each element inherits.
    """
    passes = {way: prepare(way) for way in ("fwd", "bwd")}
    for each in passes.values():
        timed = each.timed or each.implementations
        each.timed = {name: maker for name, maker in timed.items() if name not in ("compile", "liger")}
        usual = [float(right.value.square().mean().sqrt()) for right in each.expected]
        each.expected = [
            replace(right, slack=right.slack + 4 * _tolerance.tolerance(right.dtype)[0] * size)
            for right, size in zip(each.expected, usual, strict=True)
        ]
    return passes


def _passes(leaves: list[Tensor], ours: Any, eager: Any) -> Passes:
    """Prepare both passes of a function of `leaves`; `eager` in float64 is the reference."""
    leaves = [leaf.requires_grad_() for leaf in leaves]
    gradient = torch.randn_like(ours(*leaves))
    largest = max(leaf.numel() for leaf in leaves)
    terms = [1, *(largest // leaf.numel() for leaf in leaves)]
    return _both(lambda way: compared(ours, eager, leaves, gradient, way, terms))


def _optimizers(draw: Draw, device: torch.device) -> Drawn:
    """Draw an optimizer that PyTorch has too, or a pass over all gradients, on tensors of very different sizes."""
    algorithms = [a for a in optimizers.ALGORITHMS if "eager" not in a.peers and "distributed" not in a.name]
    algorithm, count = draw.choice(algorithms), draw.size(1, 300)
    shapes: list[tuple[int, ...]] = [(draw.size(1, max(2, draw.most // (2 * count)), 4),) for _ in range(count)]
    words = f"{count} tensors {sum(map(math.prod, shapes))} elements"
    if draw.random() < 0.3:
        algorithm = draw.choice(PASSES)
    parameters = functools.partial(make_parameters, shapes, device, algorithm.dtype)
    makers, dtypes = algorithm.implementations(device), algorithm.result_dtypes
    return f"{algorithm.name} {words}", lambda: {
        "": prepared_steps(makers, algorithm.exact, parameters(), parameters, dtypes)
    }


def families() -> dict[str, Callable[[Draw, torch.device], Drawn]]:
    """Return the families that can be drawn from, by name."""
    listed = (_optimizers,)
    return {**sweeps(), **{draw.__name__.removeprefix("_"): draw for draw in listed}}
