"""Gated linear units: SwiGLU with and without bias and GeGLU, forward and backward separately, and a small step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...ops.glu import bias_glu, reference
from ..directions import SHORT, Random, exact, passes, prepare, times, with_peers
from ..registry import Case, Family, Prepared, register


class Kind(NamedTuple):
    """A variant of the gated linear unit; it has one row in the table per direction, under this name."""

    name: str
    activation: str
    bias: bool


SWIGLU = Kind("bias_swiglu", "silu", True)
KINDS = (SWIGLU, Kind("swiglu(no bias)", "silu", False), Kind("bias_geglu", "gelu_tanh", True))
GPU_SHAPES = ((torch.bfloat16, 16384, 22016), (torch.float32, 8192, 22016))
GPU_STEPS = ((torch.bfloat16, 128, 2048), (torch.bfloat16, 1024, 8192))
CPU_SHAPES = ((torch.float32, 512, 4096), (torch.bfloat16, 512, 4096))


def _eager(input: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    gate, value = (input if bias is None else input + bias).chunk(2, -1)
    activated = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    return activated * value


def _liger() -> Callable[..., Any]:
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction  # type: ignore[import-not-found]

    return lambda input, bias, activation: LigerFusedGateUpSiLUMulFunction.apply(input)


def _prepare(kind: Kind, dtype: torch.dtype, rows: int, columns: int, direction: str, device: torch.device) -> Prepared:
    random = Random(device)
    input = random.normal(rows, columns, dtype=dtype).requires_grad_()
    gradient = random.normal(rows, columns // 2, dtype=dtype)
    bias = random.normal(columns, dtype=dtype).requires_grad_() if kind.bias else None
    whole = direction == "step"
    liger = None if whole or kind.bias or kind.activation != "silu" else _liger
    arguments = (input, bias, kind.activation)
    expected = exact(reference.forward, arguments, gradient, direction, dtype, (1, 1, rows) if kind.bias else (1, 1))
    makers = with_peers(bias_glu, _eager, device, compile=not whole, liger=liger)
    return prepare(makers, arguments, gradient, direction, expected)


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Return large shapes in both directions, then steps of small shapes; a CPU gets smaller shapes."""
    shapes, steps = (GPU_SHAPES, GPU_STEPS) if device.type == "cuda" else (CPU_SHAPES, ())
    most = 1 if quick else None
    rows = [(kind, shape, {"fwd": 3, "bwd": 5}) for shape in shapes[:most] for kind in KINDS[:most]]
    rows += [(SWIGLU, shape, {"step": 8}) for shape in steps[:most]]
    result = []
    for kind, (dtype, *sizes), halves in rows:  # number of tensors of half the input's size; biases are negligible
        moved = {way: count * math.prod(sizes) // 2 * dtype.itemsize for way, count in halves.items()}
        result += passes(f"{kind.name} {SHORT[dtype]} {times(sizes)}", moved, _prepare, kind, dtype, *sizes)
    return result


register(Family("glu", "gated linear units: SwiGLU and GeGLU", cases))
