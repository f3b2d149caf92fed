"""Examples of multihead attention with its projections, and of dropout with a residual.

The last size is the probability of dropout in percent. Rows with dropout are checked without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .._examples import Example, Make, Row
from .masks import Mask, MaskKind
from .op import NORM_EPS, attention, dropout_add

_HALF, _F32 = torch.float16, torch.float32
_SHORT, _MIDDLE, _LONG = (64, 80, 1024, 16), (512, 16, 1024, 16), (2048, 8, 1024, 16)
_CPU = (128, 4, 256, 4)
# So rare that no element is dropped: random numbers have fewer digits.
_NEVER = 1e-12


def _matrix(make: Make, rows: int, columns: int) -> Tensor:
    return make.normal(rows, columns, grad=False).mul_(columns**-0.5).requires_grad_()


def _mask(make: Make, kind: str, length: int, batch: int) -> Tensor | None:
    """Return a padding mask that hides up to half of each sequence's keys, or one that hides the future."""
    keys = torch.arange(length, dtype=torch.int64, device=make.device)
    if kind == "padding":
        return keys >= make.integers(-(-length // 2), length + 1, batch, 1)
    return keys > keys[:, None] if kind == "time" else None


def _by_hand(kind: str) -> Callable[..., Tensor]:
    """Return attention around `scaled_dot_product_attention`, with our order of parameters and our masks."""

    def split(packed: Tensor, parts: int, heads: int) -> list[Tensor]:
        return [part.permute(1, 2, 0, 3) for part in packed.unflatten(2, (heads, parts, -1)).unbind(3)]

    def attend(
        query: Tensor, key: Tensor | None, weights: Sequence[Tensor], norm: Sequence[Tensor], mask: Tensor | None,
        heads: int, dropout: float,
    ) -> Tensor:  # fmt: skip
        inputs = query
        if norm:
            gamma, beta = norm
            inputs = functional.layer_norm(query, query.shape[2:], gamma, beta, NORM_EPS)
        if key is None:
            q, k, v = split(functional.linear(inputs, weights[0]), 3, heads)
        else:
            (q,) = split(functional.linear(inputs, weights[0]), 1, heads)
            k, v = split(functional.linear(key, weights[1]), 2, heads)
        seen = None if mask is None else ~(mask[:, None, None, :] if kind == "padding" else mask)
        context = functional.scaled_dot_product_attention(q, k, v, seen, dropout, is_causal=kind == "causal")
        outputs = functional.linear(context.permute(2, 0, 1, 3).reshape(query.shape), weights[-1])
        return query + functional.dropout(outputs, dropout) if norm else outputs

    return attend


def _ours(kind: str) -> Callable[..., Tensor]:
    mask_kind = None if kind == "none" else MaskKind[kind.upper()]

    def attend(
        query: Tensor, key: Tensor | None, weights: Sequence[Tensor], norm: Sequence[Tensor], mask: Tensor | None,
        heads: int, dropout: float,
    ) -> Tensor:  # fmt: skip
        inputs = [query] if key is None else [query, key]
        hidden = None if mask_kind is None else Mask(mask_kind, mask)
        return attention(inputs, weights, heads=heads, mask=hidden, dropout=dropout, norm=norm)

    return attend


def _example(kind: str, listed: Sequence[Row], *, encdec: bool = False, norm: bool = False) -> Example:
    def arguments(make: Make, length: int, batch: int, width: int, heads: int, percent: int = 0) -> dict[str, Any]:
        query, key = make.normal(length, batch, width), make.normal(length, batch, width) if encdec else None
        weights = [_matrix(make, parts * width, width) for parts in ((1, 2, 1) if encdec else (3, 1))]
        return {
            "query": query,
            "key": key,
            "weights": weights,
            "norm": [make.weight(width), make.weight(width)] if norm else [],
            "mask": _mask(make, kind, length, batch),
            "heads": heads,
            "dropout": percent / 100,
        }

    words = ("encdec" if encdec else "self") + ("_norm_add" if norm else "")
    return Example(
        f"{words}_attention_{kind}",
        _ours(kind),
        arguments,
        torch=_by_hand(kind),
        sizes="length x batch x width x heads",
        small=[(6, 3, 16, 2)],
        listed=listed,
        title=words.replace("_norm", " norm") + " {dtype} {s[0]}x{s[1]}x{s[2]} " + kind + " dropout {s[4]}%",
        # torch.compile is a peer only if there are operations around PyTorch's attention to fuse.
        compiles=norm,
        builds=False,
        checked=lambda *sizes: (24, 3, 64, 4),
        # Sums over an embedding and over all keys, of terms that are such sums themselves.
        terms=lambda length, batch, width, *_: width * length,
        cancels=True,
        # Up to six results are rounded one after the other.
        slack=lambda dtype: 8 * torch.finfo(dtype).eps,
        differentiable_twice=False,
    )


def _rows(sizes: tuple[int, ...], *percents: int, dtype: torch.dtype = _HALF) -> list[Row]:
    """Return benchmark rows for a GPU. Short sequences are timed as whole steps, because the host limits them too."""
    way = "step" if sizes == _SHORT else "fwd+bwd"
    return [Row("cuda", dtype, (*sizes, percent), [way]) for percent in percents]


def _on_cpu(*percents: int) -> list[Row]:
    return [Row("cpu", _F32, (*_CPU, percent), ["step"]) for percent in percents]


EXAMPLES = [
    _example("none", [*(row for sizes in (_SHORT, _MIDDLE, _LONG) for row in _rows(sizes, 0, 10)), *_on_cpu(0, 10)]),
    _example(
        "padding",
        [
            *(row for sizes in (_SHORT, _MIDDLE, _LONG) for row in _rows(sizes, 0, 10)),
            *_rows(_LONG, 0, dtype=torch.bfloat16),
            *_on_cpu(0),
        ],
    ),
    _example("time", [*_rows(_SHORT, 0, 10), *_rows(_LONG, 0, 10)]),
    _example("causal", [*_rows(_LONG, 0, 10), *_on_cpu(0)]),
    _example("padding", [*_rows(_SHORT, 10), *_rows(_MIDDLE, 10)], encdec=True),
    _example("none", [*_rows(_SHORT, 10), *_rows(_MIDDLE, 10), *_rows(_LONG, 0, 10), *_on_cpu(0, 10)], norm=True),
    _example("padding", _rows(_MIDDLE, 10), encdec=True, norm=True),
    Example(
        "dropout_add",
        lambda x, residual: dropout_add(x, residual, _NEVER),
        lambda make, *sizes: {"x": make.normal(*sizes), "residual": make.normal(*sizes)},
        torch=lambda x, residual: residual + x,
        sizes="rows x columns",
        small=[(5, 7), (3, 4000), (1, 1)],
    ),
]
