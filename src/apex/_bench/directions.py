"""A differentiable function as a case: who computes it, on what, and which pass is measured.

A direction is "fwd" for the forward pass, "bwd" for the backward pass alone, "step" for both in one call. Arguments
that require gradients are the leaves.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .compiling import compiled
from .registry import OURS, Call, Case, Expected, Prepared

SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}

# Makes a function, importing and compiling what it needs; the function returns one tensor or several.
Maker = Callable[[], Callable[..., Any]]


def long_name(dtype: torch.dtype) -> str:
    """Such as "float32"."""
    return str(dtype).removeprefix("torch.")


class Random:
    """Random tensors on a device, the same at every run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(
        self, *shape: int, dtype: torch.dtype = torch.float32, layout: torch.memory_format = torch.contiguous_format
    ) -> Tensor:
        values = torch.randn(shape, generator=self.generator, device=self.device).to(dtype)
        return values.to(memory_format=layout)

    def uniform(self, *shape: int) -> Tensor:
        """Between 0 and 1."""
        return torch.rand(shape, generator=self.generator, device=self.device)

    def weight(self, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Between 0.5 and 1.5."""
        return self.uniform(size).add(0.5).to(dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)


def has_liger(device: torch.device) -> bool:
    """Whether Liger-Kernel is a peer: on a GPU, where it is installed."""
    return device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None


def with_peers(
    ours: Callable[..., Any],
    eager: Callable[..., Any],
    device: torch.device,
    *,
    compile: bool = True,
    liger: Maker | None = None,
) -> dict[str, Maker]:
    """Ours, PyTorch's operators, and on a GPU those that bring kernels of their own: torch.compile and Liger-Kernel."""
    makers: dict[str, Maker] = {OURS: lambda: ours, "torch": lambda: eager}
    if compile and device.type == "cuda":
        makers["compile"] = lambda: compiled(eager, device)
    if liger is not None and has_liger(device):
        makers["liger"] = liger
    return makers


def leaves_of(arguments: Sequence[Any]) -> list[Tensor]:
    """The tensors that require gradients."""
    return [each for each in arguments if isinstance(each, Tensor) and each.requires_grad]


def prepare(
    makers: Mapping[str, Maker],
    arguments: Sequence[Any],
    gradient: Tensor | Sequence[Tensor],
    direction: str,
    expected: Sequence[Expected],
    leaves: Sequence[Tensor] | None = None,
) -> Prepared:
    """The implementations on the same arguments; `leaves` are given where a module holds some of them."""
    own = leaves_of(arguments) if leaves is None else leaves
    calls = {name: functools.partial(call, make, arguments, own, gradient, direction) for name, make in makers.items()}
    return Prepared(calls, expected)


def call(
    make: Maker, arguments: Sequence[Any], leaves: Sequence[Tensor], gradient: Tensor | Sequence[Tensor], direction: str
) -> Call:
    """One direction of a function: a call returns its outputs, or the gradients of the leaves."""
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
    """The right results: those of `function` in float64.

    An output is delivered in `dtype`, a gradient in that of its leaf. `terms` says how many numbers each element of the
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


def compared(
    ours: Callable[..., Any],
    eager: Callable[..., Any],
    arguments: Sequence[Any],
    gradient: Tensor,
    direction: str,
    terms: Sequence[int] = (),
    **peers: Any,
) -> Prepared:
    """Ours beside PyTorch's operators, which in float64 give what is right; `peers` as for `with_peers`."""
    expected = exact(eager, arguments, gradient, direction, gradient.dtype, terms)
    return prepare(with_peers(ours, eager, gradient.device, **peers), arguments, gradient, direction, expected)


def without_kink(gradient: Tensor, before: Tensor) -> Tensor:
    """No gradient where ReLU's input is nearly zero: rounding decides on which side such an element lies."""
    return gradient.masked_fill_(before.abs() < (1e-3 if gradient.dtype == torch.float32 else 0.05), 0)


def times(shape: Sequence[int]) -> str:
    """Such as "2x320x8x8"."""
    return "x".join(map(str, shape))


def passes(
    name: str, moved: Mapping[str, int], prepare: Callable[..., Prepared], *arguments: Any, note: str | None = None
) -> list[Case]:
    """Cases of `prepare(*arguments, direction, device)` with the bytes that each direction moves.

    A step is timed as a training loop sees it.
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
