"""Examples of the scaled softmax of attention scores: without a mask, with a mask, causal."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import _examples
from .._examples import Example, Make, Public, Random, Row, Sizes
from .op import masked_softmax
from .reference import causal_mask

_BF16, _F32 = torch.bfloat16, torch.float32
_SCALE = 0.125
_FUNCTIONAL = "transformer.functional:"


def _call(input: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    return masked_softmax(input, mask, scale=scale, causal=causal)


def _hidden(input: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    return causal_mask(input.shape[-2], input.shape[-1], input.device) if causal else mask


def _torch(input: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    scores, hidden = input * scale, _hidden(input, mask, causal)
    return torch.softmax(scores if hidden is None else scores.masked_fill(hidden, -10000.0), -1)


def _exact(input: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Return the softmax over the visible keys; zeros for a query that sees none."""
    hidden = _hidden(input, mask, causal)
    if hidden is None:
        return torch.softmax(input * scale, -1)
    nothing = hidden.all(-1, keepdim=True)
    return torch.softmax((input * scale).masked_fill(hidden & ~nothing, -math.inf), -1).masked_fill(nothing, 0.0)


def _draw(random: Random) -> Sizes:
    keys = min(random.length(16, 8192), math.isqrt(random.most))
    queries = keys if random.random() < 0.7 else random.size(1, keys)
    heads = min(random.choice((1, 4, 8, 12, 16)), max(1, random.most // max(1, queries * keys)))
    return random.size(1, min(64, random.most // max(1, heads * queries * keys))), heads, queries, keys


def _draw_causal(random: Random) -> Sizes:
    keys = min(random.length(16, 8192), math.isqrt(random.most))
    return 1, random.size(1, min(1024, random.most // (keys * keys))), keys, keys


def _asks(queries: int, keys: int, causal: bool, **_: Any) -> Sizes | None:
    return None if causal else (1, 1, queries, keys)  # the rows of all heads count as queries


def _asks_causal(queries: int, keys: int, causal: bool, **_: Any) -> Sizes | None:
    return (1, max(1, _examples.USUAL_ELEMENTS // (queries * keys)), queries, keys) if causal else None


def _example(name: str, title: str, kind: str, **others: Any) -> Example:
    def arguments(make: Make, *shape: int) -> dict[str, Any]:
        input, mask = make.normal(*shape), None
        if kind == "masked":
            mask = make.uniform(shape[0], 1, *shape[2:]) < 0.2
        return {"input": input, "mask": mask, "scale": _SCALE, "causal": kind == "causal"}

    def bytes_moved(dtype: torch.dtype, *shape: int) -> tuple[float, float]:
        """Return the bytes of both passes: a causal one reads half of its inputs, a mask is a byte per score."""
        tensor, read = math.prod(shape) * dtype.itemsize, 0.5 if kind == "causal" else 1.0
        mask = math.prod(shape) // shape[1] if kind == "masked" else 0
        return (1 + read) * tensor + mask, (1 + 2 * read) * tensor

    return Example(
        name,
        _call,
        arguments,
        torch=_torch,
        exact=_exact,
        sizes="batch x heads x queries x keys",
        usual=(8, 16, 1024, 1024),
        title=title + " {short} {shape}",
        bytes_moved=bytes_moved,
        # Float64 results of all matrices would not fit into memory.
        checked=lambda first, *rest: (min(first, 2), *rest),
        terms=lambda *shape: shape[-1],
        # Probabilities near one, as for the first causal queries, are saved with an error of a quarter of eps.
        slack=lambda dtype: _SCALE * torch.finfo(dtype).eps / 4,
        strided=True,
        **others,
    )


_STEP = [Row(device, _BF16, (4, 16, 128, 128), ["step"]) for device in ("cuda", "cpu")]
_CPU = [Row("cpu", dtype, (4, 4, 512, 512)) for dtype in (_F32, _BF16)]
_CAUSAL = [(64, 1024, 1024), (64, 2048, 2048), (16, 8192, 8192)]

EXAMPLES = [
    _example(
        "softmax",
        "scaled_softmax",
        "plain",
        small=[(2, 2, 8, 64), (2, 3, 5, 37), (2, 2, 16, 1000), (1, 1, 1, 16400)],
        draw=_draw,
        listed=[Row("cuda", _BF16, (8, 16, 2048, 2048)), Row("cuda", _F32, (8, 16, 1024, 1024)), *_STEP, *_CPU],
        public=[Public(f"{_FUNCTIONAL}scaled_softmax", "input", "scale")],
        extensions=["scaled_softmax_cuda"],
        asks={"softmax.rows_config": _asks},
    ),
    _example(
        "masked_softmax",
        "masked_softmax",
        "masked",
        small=[(3, 2, 8, 33), (2, 2, 16, 1000)],
        draw=_draw,
        listed=[Row("cuda", _BF16, (8, 16, 2048, 2048)), *_STEP, *_CPU],
        public=[
            Public(f"{_FUNCTIONAL}scaled_masked_softmax", "input", "mask", "scale"),
            Public(f"{_FUNCTIONAL}generic_scaled_masked_softmax", "input", "mask", "scale"),
            Public("ops:masked_softmax", "input", "mask"),
        ],
        extensions=["scaled_masked_softmax_cuda", "generic_scaled_masked_softmax_cuda"],
    ),
    _example(
        "causal_softmax",
        "causal_softmax",
        "causal",
        small=[(2, 32, 32), (2, 5, 44), (2, 50, 16), (2, 2, 8208)],
        draw=_draw_causal,
        listed=[
            *(Row("cuda", _BF16, shape) for shape in _CAUSAL),
            *_STEP,
            *(Row("cpu", dtype, (16, 512, 512)) for dtype in (_F32, _BF16)),
        ],
        public=[Public(f"{_FUNCTIONAL}scaled_upper_triang_masked_softmax", "input", None, "scale")],
        extensions=["scaled_upper_triang_masked_softmax_cuda"],
        asks={"softmax.rows_config": _asks_causal},
    ),
]
