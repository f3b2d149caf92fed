"""Examples of attention: with a mask and a trained bias, as OpenFold has it, and within packed sequences."""

from __future__ import annotations

import functools
import math
import random as python_random
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import _examples
from .._examples import Example, Make, Public, Random, Row, Sizes
from . import reference
from .op_biased import attention
from .op_packed import packed_attention
from .op_varlen import varlen_attention

_BF16, _HALF, _F32 = torch.bfloat16, torch.float16, torch.float32
_INF = 1e9
_RULES = ("forward_tile", "queries_tile", "keys_tile", "stored_tile")
_OPENFOLD = [(256, 4, 256, 32), (128, 8, 256, 32), (256, 8, 128, 32), (512, 4, 384, 32), (128, 8, 384, 16)]


def _arguments(make: Make, batch: int, heads: int, length: int, size: int) -> dict[str, Any]:
    # Heads come after lengths in memory, as projections produce them.
    query, key, value = (
        make.normal(batch, length, heads, size, grad=False).transpose(1, 2).requires_grad_() for _ in range(3)
    )
    mask = (make.uniform(batch, 1, 1, length) > 0.1).to(make.dtype)
    mask[..., 0] = 1
    bias = make.normal(1, heads, length, length)
    return {"query": query, "key": key, "value": value, "mask": mask, "bias": bias, "inf": _INF}


def _torch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, bias: Tensor, inf: float) -> Tensor:
    logits = query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2) + (mask - 1) * inf + bias
    return torch.softmax(logits, -1) @ value


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, bias: Tensor, inf: float) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, bias + (mask - 1) * inf)


def _draw(random: Random) -> Sizes:
    size, heads = random.choice((8, 16, 32, 32, 64)), random.choice((1, 2, 4, 8))
    length = random.size(16, min(768, math.isqrt(random.most // heads)), random.choice((1, 8, 16)))
    return random.size(1, min(512, random.most // (heads * length * max(length, size)))), heads, length, size


def _asks(head_dim: int, rows: int, **_: Any) -> Sizes:
    return max(1, _examples.USUAL_ELEMENTS // (4 * rows * rows)), 4, rows, head_dim


def _packed_torch(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float) -> Tensor:
    """Compute packed attention by PyTorch: pads and masks the sequences unless all have the greatest length."""
    sequences, inside, mask = len(cu_seqlens) - 1, None, None
    if len(qkv) == sequences * max_seqlen:
        padded = qkv.view(sequences, max_seqlen, *qkv.shape[1:])
    else:
        inside = torch.arange(max_seqlen, dtype=torch.int64, device=qkv.device) < cu_seqlens.diff()[:, None]
        mask = inside[:, None, None, :]
        padded = qkv.new_zeros(sequences, max_seqlen, *qkv.shape[1:])
        padded = padded.masked_scatter(inside[:, :, None, None, None], qkv)
    query, key, value = padded.permute(2, 0, 3, 1, 4)
    output = functional.scaled_dot_product_attention(query, key, value, mask, dropout_p).transpose(1, 2)
    return output.flatten(0, 1) if inside is None else output[inside]


def _packed(name: str, title: str, shortest: int, **others: Any) -> Example:
    """Return an example of sequences with lengths drawn between the greatest length / `shortest` and the greatest.

    The last size is the probability of dropout in percent. Rows with dropout are checked without it.
    """

    def lengths(sequences: int, length: int) -> list[int]:
        drawn = python_random.Random(0)
        return [drawn.randint(-(-length // shortest), length) for _ in range(sequences)]

    def arguments(make: Make, sequences: int, length: int, heads: int, size: int, percent: int = 0) -> dict[str, Any]:
        drawn = lengths(sequences, length)
        qkv, edges = make.normal(sum(drawn), 3, heads, size), make.tensor([0, *accumulate(drawn)], torch.int32)
        return {"qkv": qkv, "cu_seqlens": edges, "max_seqlen": length, "dropout_p": percent / 100}

    def bytes_moved(dtype: torch.dtype, sequences: int, length: int, heads: int, size: int, *_: int) -> tuple[int, int]:
        """Return the bytes of queries, keys, values and outputs, and in the backward pass of their gradients, too."""
        both = 4 * sum(lengths(sequences, length)) * heads * size * dtype.itemsize
        return both, 2 * both

    return Example(
        name,
        functools.partial(packed_attention, zero_tail=False),
        arguments,
        torch=_packed_torch,
        exact=lambda qkv, cu_seqlens, max_seqlen, dropout_p: reference.packed_attention(qkv, cu_seqlens),
        sizes="sequences x length x heads x size",
        title=title + " {dtype} {s[0]}x{s[1]}x{s[2]}x{s[3]} dropout {s[4]}%",
        bytes_moved=bytes_moved,
        compiles=False,
        builds=False,  # the program for the real lengths is another one than a plan without them finds
        checked=lambda sequences, length, heads, size, *_: (3, 40, heads, size),
        terms=lambda sequences, length, heads, size, *_: length,
        cancels=True,
        differentiable_twice=False,
        **others,
    )


def _documents(count: int, longest: int) -> list[int]:
    drawn = python_random.Random(0)
    return [longest, *(drawn.randint(-(-longest // 16), longest) for _ in range(count - 1))][:count]


def _varlen_arguments(
    make: Make, documents: int, longest: int, heads: int, key_heads: int, size: int, window: int
) -> dict[str, Any]:
    """Return causal packed attention of documents of different lengths; a `window` of 0 means none."""
    lengths = _documents(documents, longest)
    rows, edges = sum(lengths), make.tensor([0, *accumulate(lengths)], torch.int32)
    query, key, value = (make.normal(rows, number, size) for number in (heads, key_heads, key_heads))
    arguments = {"query": query, "key": key, "value": value, "cu_seqlens_q": edges, "max_seqlen_q": longest}
    return {**arguments, "window": window}


def _varlen(query: Tensor, key: Tensor, value: Tensor, edges: Tensor, longest: int, window: int) -> Tensor:
    size = (window or -1, 0)
    return varlen_attention(query, key, value, edges, longest, causal=True, window_size=size)  # type: ignore[return-value]


def _varlen_exact(query: Tensor, key: Tensor, value: Tensor, edges: Tensor, longest: int, window: int) -> Tensor:
    bounds = (edges.tolist(), edges.tolist())
    return reference.varlen_attention(query, key, value, bounds, query.shape[2] ** -0.5, window or -1, 0)[0]


def _varlen_torch(query: Tensor, key: Tensor, value: Tensor, edges: Tensor, longest: int, window: int) -> Tensor:
    """Compute packed attention by PyTorch: pads the documents, with a mask of the keys that each query sees."""
    n = torch.arange(longest, dtype=torch.int64, device=query.device)
    inside = n < edges.diff()[:, None]
    seen = (n <= n[:, None]) & (n >= n[:, None] - (window or longest)) & inside[:, None, :]
    padded = (
        tensor.new_zeros(*inside.shape, *tensor.shape[1:]).masked_scatter(inside[:, :, None, None], tensor)
        for tensor in (query, key, value)
    )
    q, k, v = (tensor.transpose(1, 2) for tensor in padded)
    mask = (seen | ~inside[:, :, None])[:, None]
    return functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)[inside]


def _varlen_bytes(
    dtype: torch.dtype, documents: int, longest: int, heads: int, key_heads: int, size: int, window: int
) -> tuple[int, int]:
    """Return the bytes of queries, keys, values and outputs, and in the backward pass of their gradients, too."""
    both = 2 * sum(_documents(documents, longest)) * (heads + key_heads) * size * dtype.itemsize
    return both, 2 * both


EXAMPLES = [
    Example(
        "attention",
        attention,
        _arguments,
        torch=_torch,
        peers={"sdpa": _sdpa},
        sizes="batch x heads x length x size",
        small=[(2, 2, 32, 16), (1, 1, 1, 1), (1, 1, 70, 40)],
        large=[
            (64, 4, 256, 32),
            (64, 8, 128, 32),
            (33, 4, 384, 16),
            (20, 8, 301, 24),
            (5, 2, 200, 96),
            (2, 2, 130, 256),
        ],
        draw=_draw,
        listed=[
            *(Row("cuda", _BF16, sizes) for sizes in _OPENFOLD),
            Row("cuda", _F32, _OPENFOLD[0]),
            Row("cpu", _F32, (16, 4, 128, 32)),
        ],
        title="openfold {dtype} {shape}",
        checked=lambda batch, heads, length, size: (3, heads, 40, size),
        terms=lambda batch, heads, length, size: length,
        cancels=True,
        usual=(16, 16, 512, 64),
        public=[
            Public("contrib.openfold_triton:AttnTri", "query", "key", "value", "mask", "bias"),
            Public("contrib.openfold_triton:AttnBiasJIT", "query", "key", "value", "mask", "bias", "inf"),
            Public("contrib.openfold_triton:AttnNoBiasJIT", "query", "key", "value", "mask", "inf"),
        ],
        asks={f"attention.{rule}": _asks for rule in _RULES},
        accepts_integers=frozenset({"mask"}),
    ),
    _packed(
        "fmha",
        "fmha",
        1,
        small=[(2, 16, 2, 16), (1, 1, 1, 16)],
        listed=[
            *(Row("cuda", _HALF, (56, 512, 16, 64, percent)) for percent in (0, 10)),
            *(Row("cuda", _HALF, (*sizes, 0)) for sizes in ((32, 128, 16, 64), (16, 512, 16, 128))),
            Row("cuda", _F32, (16, 512, 16, 64, 0)),
            Row("cpu", _F32, (8, 128, 4, 64, 0)),
        ],
    ),
    _packed(
        "fmha_uneven",
        "fmha uneven",
        8,
        small=[(3, 33, 1, 16), (2, 20, 1, 20)],
        large=[(5, 512, 4, 64), (5, 512, 4, 40), (5, 512, 4, 128)],
        listed=[
            Row("cuda", _HALF, (56, 512, 16, 64, 0)),
            Row("cuda", _BF16, (56, 512, 16, 64, 10)),
            Row("cpu", _F32, (8, 128, 4, 64, 0)),
        ],
        public=[Public("contrib.fmha:FMHAFun.apply", "qkv", "cu_seqlens", "dropout_p", "max_seqlen", True, False)],
    ),
    Example(
        "varlen_attention",
        _varlen,
        _varlen_arguments,
        torch=_varlen_torch,
        exact=_varlen_exact,
        sizes="documents x longest x heads x key heads x size x window",
        small=[(3, 33, 4, 2, 16, 0), (2, 40, 2, 1, 16, 9), (1, 1, 1, 1, 16, 0)],
        large=[(5, 1000, 8, 2, 128, 0), (5, 1000, 8, 2, 64, 300), (4, 700, 4, 4, 40, 0)],
        listed=[
            Row("cuda", _BF16, (8, 2048, 32, 8, 128, 0)),
            Row("cuda", _BF16, (8, 2048, 32, 8, 128, 512)),
            Row("cpu", _F32, (4, 128, 4, 2, 64, 0)),
        ],
        bytes_moved=_varlen_bytes,
        compiles=False,
        builds=False,  # the program for the real lengths is another one than a plan without them finds
        checked=lambda documents, longest, *others: (3, 40, *others[:3], min(others[3], 16)),
        terms=lambda documents, longest, *others: longest,
        cancels=True,
        differentiable_twice=False,
    ),
]
