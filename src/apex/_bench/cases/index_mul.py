"""index_mul_2d: products with indexed rows, forward, backward and the step of a loss that holds a force."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...contrib.index_mul_2d import index_mul_2d
from ...ops.index_mul import reference
from ..registry import OURS, Call, Case, Expected, Family, Prepared, register

SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32"}

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Problem:
    """`count` rows of in2 and as many indices, into `in1_rows` rows of in1; the same at every run."""

    in1: Tensor
    in2: Tensor
    index: Tensor
    gradient: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.in1, self.in2


@dataclass(frozen=True)
class Shape:
    dtype: torch.dtype
    in1_rows: int
    count: int
    columns: int

    def __str__(self) -> str:
        name = f"index_mul_2d {SHORT[self.dtype]} {self.count}x{self.columns}"
        return name if self.in1_rows == self.count else f"{name} of {self.in1_rows} rows"

    def bytes_moved(self, direction: str) -> int:
        """Of the first derivative at most: a force is computed by several passes."""
        rows = self.in1_rows + 2 * self.count if direction == "fwd" else 2 * self.in1_rows + 3 * self.count
        return rows * self.columns * self.dtype.itemsize

    def problem(self, device: torch.device) -> Problem:
        generator = torch.Generator(device).manual_seed(0)

        def random(rows: int) -> Tensor:
            return torch.randn(rows, self.columns, generator=generator, device=device).to(self.dtype)

        index = torch.randint(self.in1_rows, (self.count,), generator=generator, device=device)
        return Problem(
            random(self.in1_rows).requires_grad_(), random(self.count).requires_grad_(), index, random(self.count)
        )


# NVIDIA apex was recorded with 800000 positions; as many rows are what its floor counts.
GPU_SHAPES = (
    Shape(torch.float32, 800000, 800000, 256),
    Shape(torch.float32, 100000, 800000, 256),
    Shape(torch.bfloat16, 100000, 800000, 256),
)
GPU_STEPS = (Shape(torch.float32, 500, 4096, 128),)
CPU_SHAPES = (Shape(torch.float32, 500, 8192, 128), Shape(torch.bfloat16, 500, 8192, 128))


def _eager(in1: Tensor, in2: Tensor, index: Tensor) -> Tensor:
    return in1[index] * in2


def _call(product: Product, problem: Problem, direction: str) -> Call:
    given = problem.in1, problem.in2, problem.index
    if direction == "fwd":
        return lambda: (product(*given),)
    if direction == "bwd":
        output = product(*given)
        return lambda: torch.autograd.grad(output, problem.leaves, problem.gradient, retain_graph=True)
    return lambda: _force_step(product, problem)


def _force_step(product: Product, problem: Problem) -> Sequence[Tensor]:
    """The gradients of a loss that holds a gradient of an energy."""
    energy = product(problem.in1, problem.in2, problem.index).float().square().mean()
    (force,) = torch.autograd.grad(energy, problem.in1, create_graph=True)
    return torch.autograd.grad(energy + force.float().square().sum(), problem.leaves)


def _exact(problem: Problem, direction: str) -> list[Tensor]:
    in1, in2 = (leaf.detach().double().requires_grad_() for leaf in problem.leaves)
    output = reference.forward(in1, in2, problem.index)
    if direction == "fwd":
        return [output.detach()]
    if direction == "bwd":
        return list(torch.autograd.grad(output, (in1, in2), problem.gradient.double()))
    energy = output.square().mean()
    (force,) = torch.autograd.grad(energy, in1, create_graph=True)
    return list(torch.autograd.grad(energy + force.square().sum(), (in1, in2)))


def _prepare(shape: Shape, direction: str, device: torch.device) -> Prepared:
    problem = shape.problem(device)
    terms = -(-shape.count // shape.in1_rows)
    expected = [Expected(value, shape.dtype, terms) for value in _exact(problem, direction)]
    products: dict[str, Product] = {OURS: index_mul_2d, "torch": _eager}
    return Prepared(
        {name: functools.partial(_call, product, problem, direction) for name, product in products.items()}, expected
    )


def _case(shape: Shape, direction: str) -> Case:
    make = functools.partial(_prepare, shape, direction)
    timing = "wall" if direction == "force step" else "device"
    return Case(f"{shape} {direction}", shape.bytes_moved(direction), make, timing)  # type: ignore[arg-type]


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Large shapes in both directions, then a small step with second derivatives."""
    on_gpu = device.type == "cuda"
    shapes = GPU_SHAPES if on_gpu else CPU_SHAPES
    steps = GPU_STEPS if on_gpu else CPU_SHAPES[:1]
    apart = [_case(shape, way) for shape in (shapes[:1] if quick else shapes) for way in ("fwd", "bwd")]
    return apart if quick else apart + [_case(shape, "force step") for shape in steps]


register(Family("index_mul", "products with indexed rows", cases))
