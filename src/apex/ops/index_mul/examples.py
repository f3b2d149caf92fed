"""Examples of products with indexed rows, as graph networks use them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._examples import Example, Make, Public, Random, Row, Sizes
from .op import INDEX_MUL, by_operators, check, prefers_operators

_BF16, _F32 = torch.bfloat16, torch.float32


def _arguments(make: Make, count: int, columns: int, rows: int = 0) -> dict[str, Any]:
    """Return in1 with `rows` rows (0: `count`), in2 with `count` rows, and `count` indices."""
    rows = rows or count
    return {
        "in1": make.normal(rows, columns),
        "in2": make.normal(count, columns),
        "index": make.integers(0, max(1, rows), count),
    }


def _call(in1: Tensor, in2: Tensor, index: Tensor) -> Tensor:
    check(in1, in2, index)
    return by_operators(in1, in2, index) if prefers_operators(in2) else INDEX_MUL(in1, in2, index)


def _draw(random: Random) -> Sizes:
    columns = random.length(1, 2048)
    count = random.rows(columns)
    return count, columns, random.size(1, max(1, count))


def _example(name: str, title: str, **others: Any) -> Example:
    return Example(
        name,
        _call,
        _arguments,
        torch=lambda in1, in2, index: in1[index] * in2,
        sizes="positions x columns",
        title=title,
        compiles=False,
        **others,
    )


EXAMPLES = [
    _example(
        "index_mul",
        "index_mul_2d {short} {shape}",
        small=[(33, 24)],
        listed=[Row("cuda", _F32, (800000, 256))],
        public=[Public("contrib.index_mul_2d:index_mul_2d", "in1", "in2", "index")],
        extensions=["fused_index_mul_2d"],
    ),
    _example(
        "index_mul_few_rows",
        "index_mul_2d {short} {s[0]}x{s[1]} of {s[2]} rows",
        # Rows without an index, in one chunk, in two and in many; columns in one block and in two.
        small=[(100, 40, 7), (1, 1, 1), (33, 64, 40), (700, 5, 1), (64, 32, 64), (40, 1100, 3)],
        large=[(60000, 67, 1000), (50001, 256, 30000), (20000, 128, 9)],
        draw=_draw,
        listed=[
            *(Row("cuda", dtype, (800000, 256, 100000)) for dtype in (_F32, _BF16)),
            *(Row("cpu", dtype, (8192, 128, 500)) for dtype in (_F32, _BF16)),
        ],
    ),
]
