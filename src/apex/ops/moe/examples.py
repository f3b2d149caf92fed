"""Examples of a mixture's experts: the layouts of Mixtral and of gpt-oss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._examples import Example, Make, Random, Row, Sizes
from . import reference
from .op import moe_experts

_BF16, _F32 = torch.bfloat16, torch.float32


def _function(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    interleaved: bool,
    transposed: bool,
) -> Tensor:
    bias = None if gate_up_bias is None else (gate_up_bias, down_bias)
    flags = {"interleaved": interleaved, "transposed": transposed}
    return moe_experts(x, gate_up, down, index, weight, bias=bias, activation=activation, **flags)


def _torch(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    interleaved: bool,
    transposed: bool,
) -> Tensor:
    """Compute all experts for all tokens; a token's weight is zero for experts that it did not choose."""
    output = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        first, second = (matrix[expert] if transposed else matrix[expert].t() for matrix in (gate_up, down))
        pre = x @ first if gate_up_bias is None else x @ first + gate_up_bias[expert]
        rows = reference.unit(pre, activation, interleaved) @ second
        rows = rows if down_bias is None else rows + down_bias[expert]
        output = output + rows * (weight * (index == expert)).sum(1, keepdim=True).to(x.dtype)
    return output


def _arguments(kind: tuple[str, bool, bool, bool]) -> Any:
    activation, bias, interleaved, transposed = kind

    def arguments(make: Make, tokens: int, experts: int, chosen: int, hidden: int, width: int) -> dict[str, Any]:
        def matrix(rows: int, columns: int) -> Tensor:
            sizes = (columns, rows) if transposed else (rows, columns)
            return (make.normal(experts, *sizes, grad=False) * columns**-0.5).requires_grad_()

        x = make.normal(tokens, hidden)
        return {
            "x": x,
            "gate_up": matrix(2 * width, hidden),
            "down": matrix(hidden, width),
            "index": make.integers(0, experts + 1, tokens, chosen),
            "weight": make.normal(tokens, chosen, dtype=torch.promote_types(make.dtype, _F32)),
            "gate_up_bias": make.normal(experts, 2 * width) if bias else None,
            "down_bias": make.normal(experts, hidden) if bias else None,
            "activation": activation,
            "interleaved": interleaved,
            "transposed": transposed,
        }

    return arguments


def _draw(random: Random) -> Sizes:
    hidden, width = random.length(16, 512), random.length(16, 512)
    experts = random.size(1, max(1, min(64, random.most // (3 * hidden * width))))
    return random.size(1, 1024), experts, random.size(1, 8), hidden, width


def _example(name: str, kind: tuple[str, bool, bool, bool], small: list[Sizes], **others: Any) -> Example:
    return Example(
        name,
        _function,
        _arguments(kind),
        torch=_torch,
        sizes="tokens x experts x chosen x hidden x width",
        small=small,
        draw=_draw,
        checked=lambda tokens, experts, chosen, hidden, width: (64, min(experts, 8), chosen, 64, 48),
        terms=lambda tokens, experts, chosen, hidden, width: chosen * max(hidden, width),
        cancels=True,
        compiles=False,
        **others,
    )


EXAMPLES = [
    _example(
        "moe_experts",
        ("silu", False, False, False),
        # Several tiles and columns beside them, one token, one expert, more experts than rows.
        [(24, 4, 2, 16, 24), (1, 1, 1, 1, 1), (40, 1, 3, 8, 5), (3, 9, 2, 19, 7)],
        large=[(2048, 16, 4, 512, 384), (1000, 7, 3, 520, 136)],
        listed=[Row("cuda", _BF16, (8192, 32, 4, 2048, 768)), Row("cpu", _F32, (64, 8, 2, 64, 64))],
    ),
    _example("moe_experts_gpt_oss", ("clamped", True, True, True), [(21, 3, 2, 12, 10), (5, 2, 4, 7, 9)]),
    _example("moe_experts_interleaved", ("gelu", True, True, False), [(21, 3, 2, 12, 10)]),
    _example("moe_experts_transposed", ("gelu_tanh", False, False, True), [(21, 3, 2, 12, 10)]),
]
