"""index_mul_2d: products with indexed rows, forward, backward and the step of a loss that includes a force."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...contrib.index_mul_2d import index_mul_2d
from ...ops.index_mul import reference
from ..directions import SHORT, Maker, Random, exact, passes, prepare, with_peers
from ..registry import Call, Case, Expected, Family, Prepared, register

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """A problem with `count` rows of in2 and as many indices into `in1_rows` rows of in1."""

    dtype: torch.dtype
    in1_rows: int
    count: int
    columns: int

    def __str__(self) -> str:
        name = f"index_mul_2d {SHORT[self.dtype]} {self.count}x{self.columns}"
        return name if self.in1_rows == self.count else f"{name} of {self.in1_rows} rows"

    def bytes_moved(self, direction: str) -> int:
        """Return the bytes moved by the first derivative at most; a force takes several passes."""
        rows = self.in1_rows + 2 * self.count if direction == "fwd" else 2 * self.in1_rows + 3 * self.count
        return rows * self.columns * self.dtype.itemsize


# NVIDIA apex was recorded with 800000 positions; its floor counts as many rows of in1.
GPU_SHAPES = (
    Shape(torch.float32, 800000, 800000, 256),
    Shape(torch.float32, 100000, 800000, 256),
    Shape(torch.bfloat16, 100000, 800000, 256),
)
GPU_STEPS = (Shape(torch.float32, 500, 4096, 128),)
CPU_SHAPES = (Shape(torch.float32, 500, 8192, 128), Shape(torch.bfloat16, 500, 8192, 128))


def _eager(in1: Tensor, in2: Tensor, index: Tensor) -> Tensor:
    return in1[index] * in2


def _force_step(product: Product, in1: Tensor, in2: Tensor, index: Tensor) -> Sequence[Tensor]:
    """Return the gradients of a loss that includes a gradient of an energy; in float32 at least."""
    wide = torch.promote_types(in1.dtype, torch.float32)
    energy = product(in1, in2, index).to(wide).square().mean()
    (force,) = torch.autograd.grad(energy, in1, create_graph=True)
    return torch.autograd.grad(energy + force.to(wide).square().sum(), (in1, in2))


def _force_call(make: Maker, arguments: tuple[Tensor, Tensor, Tensor]) -> Call:
    return functools.partial(_force_step, make(), *arguments)


def _prepare(shape: Shape, direction: str, device: torch.device) -> Prepared:
    random = Random(device)
    index = random.integers(0, shape.in1_rows, shape.count)
    in1, in2, gradient = (
        random.normal(rows, shape.columns, dtype=shape.dtype) for rows in (shape.in1_rows, shape.count, shape.count)
    )
    arguments = (in1.requires_grad_(), in2.requires_grad_(), index)
    makers = with_peers(index_mul_2d, _eager, device, compile=False)
    terms = -(-shape.count // shape.in1_rows)
    if direction != "force step":
        expected = exact(reference.forward, arguments, gradient, direction, shape.dtype, [terms] * 3)
        return prepare(makers, arguments, gradient, direction, expected)
    wide = [leaf.detach().double().requires_grad_() for leaf in (in1, in2)]
    return Prepared(
        {name: functools.partial(_force_call, make, arguments) for name, make in makers.items()},
        [Expected(value, shape.dtype, terms) for value in _force_step(reference.forward, wide[0], wide[1], index)],
    )


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Return large shapes in both directions, then a small step with second derivatives."""
    shapes, steps = (GPU_SHAPES, GPU_STEPS) if device.type == "cuda" else (CPU_SHAPES, CPU_SHAPES[:1])
    rows: list[tuple[Shape, tuple[str, ...]]] = [(shape, ("fwd", "bwd")) for shape in (shapes[:1] if quick else shapes)]
    rows += [(shape, ("force step",)) for shape in (() if quick else steps)]
    return [
        case
        for shape, ways in rows
        for case in passes(str(shape), {way: shape.bytes_moved(way) for way in ways}, _prepare, shape)
    ]


register(Family("index_mul", "products with indexed rows", cases))
