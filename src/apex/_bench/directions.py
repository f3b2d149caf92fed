"""Benchmark cases of a differentiable function: its implementations, its arguments and the measured pass.

A direction is "fwd" for the forward pass, "bwd" for the backward pass alone, "step" for both in one call. Arguments
that require gradients are the leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .compiling import compiled
from .registry import OURS, Call, Case, Expected, Prepared

SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}

# Makes a function, including imports and compilation; the function returns one tensor or several.
Maker = Callable[[], Callable[..., Any]]


def long_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without the prefix, such as "float32"."""
    return str(dtype).removeprefix("torch.")


class Random:
    """A source of random tensors on a device, the same in every run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(
        self, *shape: int, dtype: torch.dtype = torch.float32, layout: torch.memory_format = torch.contiguous_format
    ) -> Tensor:
        values = torch.randn(shape, generator=self.generator, device=self.device).to(dtype)
        return values.to(memory_format=layout)

    def uniform(self, *shape: int) -> Tensor:
        """Return values between 0 and 1."""
        return torch.rand(shape, generator=self.generator, device=self.device)

    def weight(self, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return values between 0.5 and 1.5."""
        return self.uniform(size).add(0.5).to(dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)


def with_peers(
    ours: Callable[..., Any], eager: Callable[..., Any], device: torch.device, *, compile: bool = True
) -> dict[str, Maker]:
    """Return makers of ours and of PyTorch's operators, and on a GPU of torch.compile."""
    makers: dict[str, Maker] = {OURS: lambda: ours, "torch": lambda: eager}
    if compile and device.type == "cuda":
        makers["compile"] = lambda: compiled(eager, device)
    return makers


def leaves_of(arguments: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that require gradients."""
    return [each for each in arguments if isinstance(each, Tensor) and each.requires_grad]


def prepare(
    makers: Mapping[str, Maker],
    arguments: Sequence[Any],
    gradient: Tensor | Sequence[Tensor],
    direction: str,
    expected: Sequence[Expected],
    leaves: Sequence[Tensor] | None = None,
) -> Prepared:
    """Prepare all implementations on the same arguments; pass `leaves` if a module holds some of them."""
    own = leaves_of(arguments) if leaves is None else leaves
    calls = {name: functools.partial(call, make, arguments, own, gradient, direction) for name, make in makers.items()}
    return Prepared(calls, expected)


def call(
    make: Maker, arguments: Sequence[Any], leaves: Sequence[Tensor], gradient: Tensor | Sequence[Tensor], direction: str
) -> Call:
    """Return a call of one direction of a function: it returns outputs, or the gradients of the leaves."""
    function = make()
    if direction == "fwd":

        def forward() -> Sequence[Tensor]:
            output = function(*arguments)
            return (output,) if isinstance(output, Tensor) else output

        return forward
    if direction == "bwd":
        output = function(*arguments)
        if isinstance(gradient, Tensor):
            gradient = gradient.to(output.dtype)  # a peer may return float32
        return lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True)
    return lambda: torch.autograd.grad(function(*arguments), leaves, gradient)


def exact(
    function: Callable[..., Tensor],
    arguments: Sequence[Any],
    gradient: Tensor,
    direction: str,
    dtype: torch.dtype,
    terms: Sequence[int] = (),
) -> list[Expected]:
    """Return the expected results: the results of `function` in float64.

    An output has dtype `dtype`, a gradient the dtype of its leaf. `terms` says how many numbers each element of the
    output, then of each leaf's gradient, is the sum of.
    """
    wide = [
        each.detach().double().requires_grad_(each.requires_grad)
        if isinstance(each, Tensor) and each.is_floating_point()
        else each
        for each in arguments
    ]
    leaves = leaves_of(arguments)
    output = function(*wide)
    terms = terms or [1] * (1 + len(leaves))
    if direction == "fwd":
        return [Expected(output.detach(), dtype, terms[0])]
    gradients = torch.autograd.grad(output, leaves_of(wide), gradient.double())
    return [Expected(g, leaf.dtype, count) for g, leaf, count in zip(gradients, leaves, terms[1:], strict=True)]


def times(shape: Sequence[int]) -> str:
    """Return a shape as text, such as "2x320x8x8"."""
    return "x".join(map(str, shape))


def passes(
    name: str, moved: Mapping[str, int], prepare: Callable[..., Prepared], *arguments: Any, note: str | None = None
) -> list[Case]:
    """Return the cases `prepare(*arguments, direction, device)` of all directions; `moved` has the bytes of each.

    A step is timed by the wall clock, as a training loop sees it.
    """
    return [
        Case(
            f"{name} {way}",
            size,
            functools.partial(prepare, *arguments, way),
            "wall" if way.endswith("step") else "device",
            note,
        )
        for way, size in moved.items()
    ]
