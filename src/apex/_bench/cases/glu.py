"""Gated linear units: SwiGLU with and without bias and GeGLU, forward and backward apart, a small step."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ...ops.glu import bias_glu, reference
from ..compiling import compiled
from ..registry import OURS, Call, Case, Expected, Family, Prepared, register


@dataclass(frozen=True)
class Kind:
    """One row of the table per direction, under this name."""

    name: str
    activation: str
    bias: bool


SWIGLU = Kind("bias_swiglu", "silu", True)
KINDS = (SWIGLU, Kind("swiglu(no bias)", "silu", False), Kind("bias_geglu", "gelu_tanh", True))
SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32"}
GPU_SHAPES = ((torch.bfloat16, 16384, 22016), (torch.float32, 8192, 22016))
GPU_STEPS = ((torch.bfloat16, 128, 2048), (torch.bfloat16, 1024, 8192))
CPU_SHAPES = ((torch.float32, 512, 4096), (torch.bfloat16, 512, 4096))
# Tensors of half the input's size that each direction reads and writes; biases are negligible.
HALVES_MOVED = {"fwd": 3, "bwd": 5, "step": 8}

Glu = Callable[[], Tensor]


def _eager(kind: Kind, input: Tensor, bias: Tensor | None) -> Tensor:
    gate, value = (input if bias is None else input + bias).chunk(2, -1)
    activated = functional.silu(gate) if kind.activation == "silu" else functional.gelu(gate, approximate="tanh")
    return activated * value


def _call(make: Callable[[], Glu], leaves: Sequence[Tensor], gradient: Tensor, direction: str) -> Call:
    glu = make()
    if direction == "fwd":
        return lambda: (glu(),)
    if direction == "bwd":
        output = glu()
        return lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True)
    return lambda: torch.autograd.grad(glu(), leaves, gradient)


def _prepare(kind: Kind, dtype: torch.dtype, rows: int, columns: int, direction: str, device: torch.device) -> Prepared:
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    input, gradient = random(rows, columns).requires_grad_(), random(rows, columns // 2)
    bias = random(columns).requires_grad_() if kind.bias else None
    leaves = [input] if bias is None else [input, bias]
    makers: dict[str, Callable[[], Glu]] = {
        OURS: lambda: lambda: bias_glu(input, bias, kind.activation),
        "torch": lambda: lambda: _eager(kind, input, bias),
    }
    if device.type == "cuda" and direction != "step":
        makers["compile"] = lambda: _compiled(kind, input, bias)
        if kind.activation == "silu" and bias is None and importlib.util.find_spec("liger_kernel") is not None:
            makers["liger"] = lambda: _liger(input)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    output = reference.forward(wide[0], None if bias is None else wide[1], kind.activation)
    if direction == "fwd":
        expected = [Expected(output.detach(), dtype)]
    else:
        gradients = torch.autograd.grad(output, wide, gradient.double())
        expected = [Expected(g, dtype, r) for g, r in zip(gradients, (1, rows), strict=False)]
    calls = {name: functools.partial(_call, make, leaves, gradient, direction) for name, make in makers.items()}
    return Prepared(calls, expected)


def _compiled(kind: Kind, input: Tensor, bias: Tensor | None) -> Glu:
    function = compiled(lambda input, bias: _eager(kind, input, bias), input.device)
    return lambda: function(input, bias)


def _liger(input: Tensor) -> Glu:
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction  # type: ignore[import-not-found]

    return lambda: LigerFusedGateUpSiLUMulFunction.apply(input)


def _case(kind: Kind, dtype: torch.dtype, rows: int, columns: int, direction: str) -> Case:
    moved = HALVES_MOVED[direction] * rows * (columns // 2) * dtype.itemsize
    make = functools.partial(_prepare, kind, dtype, rows, columns, direction)
    name = f"{kind.name} {SHORT[dtype]} {rows}x{columns} {direction}"
    return Case(name, moved, make, "wall" if direction == "step" else "device")


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Large shapes in both directions, then steps of small ones; a processor gets smaller shapes."""
    shapes = list(GPU_SHAPES if device.type == "cuda" else CPU_SHAPES)
    steps = list(GPU_STEPS if device.type == "cuda" else [])
    kinds: Sequence[Kind] = KINDS
    if quick:
        shapes, steps, kinds = shapes[:1], steps[:1], (SWIGLU,)
    apart = [_case(kind, *shape, way) for shape in shapes for kind in kinds for way in ("fwd", "bwd")]
    return apart + [_case(SWIGLU, *shape, "step") for shape in steps]


register(Family("glu", "gated linear units: SwiGLU and GeGLU", cases))
