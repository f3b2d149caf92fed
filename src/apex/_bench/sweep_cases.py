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
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import _tolerance
from ..ops._examples import Random
from ..ops.batch_norm import batch_norm
from .cases import dense, optimizers
from .directions import compared, long_name, times, without_kink
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

    def parameters(self, count: int, size: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Return weights and biases around one."""
        return [self.tensor((size,), dtype, device).mul_(0.2).add_(1) for _ in range(count)]


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


def _passes(leaves: list[Tensor], ours: Any, eager: Any, kink: Any = None, summed: int = 1) -> Passes:
    """Prepare both passes of a function of `leaves`; `eager` in float64 is the reference; `summed` values are added.

    Gradients of elements whose `kink` value is nearly zero are set to zero.
    """
    leaves = [leaf.requires_grad_() for leaf in leaves]
    gradient = torch.randn_like(ours(*leaves))
    if kink is not None:
        without_kink(gradient, kink(*(leaf.detach().double() for leaf in leaves)))
    largest = max(leaf.numel() for leaf in leaves)
    terms = [1, *(summed * largest // leaf.numel() for leaf in leaves)]
    return _both(lambda way: compared(ours, eager, leaves, gradient, way, terms))


def _image(draw: Draw, multiple: int, most_channels: int) -> tuple[tuple[int, ...], torch.memory_format]:
    channels = draw.size(max(8, multiple), min(most_channels, draw.most // 64), multiple)
    side = draw.choice((4, 7, 8, 14, 16, 28, 32, 40, 48, 56, 64, 96, 112, 128))
    side = max(2, min(side, math.isqrt(draw.most // channels)))
    images = draw.size(1, min(128, draw.most // (channels * side * side)))
    return (images, channels, side, side), draw.choice((torch.channels_last, torch.contiguous_format))


def _batch_norm(draw: Draw, device: torch.device) -> Drawn:
    dtype, relu, addend = draw.dtype(), draw.random() < 0.7, draw.random() < 0.3
    shape, memory = _image(draw, draw.choice((1, 8, 16, 64)), 2048)

    def plain(x: Tensor, weight: Tensor, bias: Tensor, *z: Tensor) -> Tensor:
        return sum(z, F.batch_norm(x, None, None, weight, bias, True))

    ours = lambda x, w, b, z=None: batch_norm(x, None, None, w, b, z=z, relu=relu)  # noqa: E731
    eager = lambda *tensors: (F.relu if relu else nn.Identity())(plain(*tensors))  # noqa: E731

    def make() -> Passes:
        x, *z = (draw.tensor(shape, dtype, device).contiguous(memory_format=memory) for _ in range(1 + addend))
        leaves = [x, *draw.parameters(2, shape[1], torch.float32, device), *z]
        return _passes(leaves, ours, eager, plain if relu else None)

    return _name(dtype, shape, memory, "add" * addend, "relu" * relu), make


def _dense(draw: Draw, device: torch.device) -> Drawn:
    dtype, multiple, most = draw.dtype(), draw.choice((64, 64, 8, 1)), max(16, math.isqrt(draw.most) // 2)
    rows, *sizes = (draw.size(16, 2 * most), *(draw.size(16, most, multiple) for _ in range(4)))
    if draw.random() < 0.5:
        make = lambda: _both(lambda way: dense._prepare_mlp(dtype, rows, sizes, way, device))  # noqa: E731
        return f"mlp {_name(dtype, (rows, *sizes))}", make
    outer, inner = sizes[:2]
    make = lambda: _both(lambda way: dense._prepare_gelu(dtype, rows, outer, inner, False, way, device))  # noqa: E731
    return f"gelu {_name(dtype, (rows, outer, inner))}", make


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
    listed = (_batch_norm, _dense, _optimizers)
    return {**sweeps(), **{draw.__name__.removeprefix("_"): draw for draw in listed}}
