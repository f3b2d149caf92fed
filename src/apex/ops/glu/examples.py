"""Examples of gated linear units: SwiGLU, GeGLU and ReGLU with and without a bias, and of gate and value apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._examples import Example, Make, Public, Random, Row, Sizes
from . import reference
from .op import bias_glu, glu_pair

_BF16, _F32 = torch.bfloat16, torch.float32
_GPU = [Row("cuda", _BF16, (16384, 22016)), Row("cuda", _F32, (8192, 22016))]
_STEPS = [Row("cuda", _BF16, sizes, ["step"]) for sizes in ((128, 2048), (1024, 8192))]
_CPU = [Row("cpu", dtype, (512, 4096)) for dtype in (_F32, _BF16)]

# With and without masks, one element, one tile, several tiles, more rows than programs.
_SMALL = [(12, 200), (5, 74), (1, 2), (4, 2048), (3, 2100), (90, 30), (256, 16)]

# Name of the example, title of its rows, activation, with a bias, rows of `apex bench`, public function.
_KINDS: list[tuple[str, str, str, bool, list[Row], str | None]] = [
    ("swiglu", "bias_swiglu", "silu", True, _GPU + _CPU + _STEPS, "fused_bias_swiglu"),
    ("swiglu_no_bias", "swiglu(no bias)", "silu", False, _GPU + _CPU, None),
    ("geglu", "bias_geglu", "gelu_tanh", True, _GPU + _CPU, "fused_bias_geglu"),
    ("reglu", "bias_reglu", "relu", True, [], "fused_bias_reglu"),
    ("gelu_glu", "bias_gelu_glu", "gelu", True, [], None),
]


def _torch(input: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    gate, value = (input if bias is None else input + bias).chunk(2, -1)
    return reference.activated(gate, activation) * value


def _draw(random: Random) -> Sizes:
    columns = 2 * random.length(32, 24000)
    return random.rows(columns), columns


def _example(name: str, title: str, activation: str, bias: bool, listed: list[Row], public: str | None) -> Example:
    def arguments(make: Make, rows: int, columns: int) -> dict[str, Any]:
        input, offset = make.normal(rows, columns), make.normal(columns) if bias else None
        return {"input": input, "bias": offset, "activation": activation}

    return Example(
        name,
        bias_glu,
        arguments,
        torch=_torch,
        sizes="rows x columns",
        small=_SMALL if name == "swiglu" else _SMALL[:2],
        large=[(1000, 22016), (4097, 8190), (20000, 514)] if name == "swiglu" else [],
        draw=_draw,
        listed=listed,
        title=title + " {short} {shape}",
        kink=(lambda input, bias, activation: (input + bias).chunk(2, -1)[0]) if activation == "relu" else None,
        public=[Public(f"fused_bias_swiglu:{public}", "input", "bias")] if public else [],
        usual=(16384, 4096),
        extensions=["fused_bias_swiglu"] if name == "swiglu" else [],
        asks={f"glu.{way}_tile": lambda rows, width, **_: (rows, 2 * width) for way in ("forward", "backward")}
        if name == "swiglu"
        else {},
    )


def _pair(activation: str) -> Example:
    def arguments(make: Make, rows: int, columns: int) -> dict[str, Any]:
        return {"gate": make.normal(rows, columns), "value": make.normal(rows, columns), "activation": activation}

    return Example(
        f"glu_pair_{activation}",
        glu_pair,
        arguments,
        torch=lambda gate, value, activation: reference.activated(gate, activation) * value,
        sizes="rows x columns",
        small=[(12, 100), (5, 15)],
        draw=_draw,
        kink=(lambda gate, value, activation: gate) if activation == "relu" else None,
    )


EXAMPLES = [*(_example(*kind) for kind in _KINDS), *map(_pair, reference.ACTIVATIONS)]
