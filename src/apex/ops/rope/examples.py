"""Examples of rotary position embeddings: sequences, packed sequences, images, a query with its key."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._examples import Example, Make, Public, Random, Row, Sizes
from .op import rotary_embedding, rotary_embedding_pair, rotate
from .reference import RopeSpec

_BF16, _HALF, _F32 = torch.bfloat16, torch.float16, torch.float32
_FUNCTIONAL = "transformer.functional:fused_apply_rotary_pos_emb"


def _angles(make: Make, positions: int, channels: int) -> Tensor:
    """Return RoFormer's angles of both halves, [positions, 1, 1, channels]."""
    rates = 10000 ** (-torch.arange(0, channels, 2, device=make.device, dtype=torch.float32) / channels)
    half = torch.arange(positions, device=make.device, dtype=torch.float32)[:, None] * rates
    return torch.cat((half, half), -1)[:, None, None]


def _turned(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the rotated tensor, computed as models do: with cosines and sines in the dtype of the input."""
    first, second = t.chunk(2, -1)
    return t * cos.to(t.dtype) + torch.cat((-second, first), -1) * sin.to(t.dtype)


def _packed_torch(t: Tensor, cu_seqlens: Tensor, freqs: Tensor) -> Tensor:
    token = torch.arange(t.shape[0], dtype=torch.int64, device=t.device)
    position = token - cu_seqlens[torch.searchsorted(cu_seqlens, token, right=True) - 1]
    return _turned(t, freqs[position, 0].cos(), freqs[position, 0].sin())


def _image_torch(t: Tensor, img_h: int, img_w: int, *tables: Tensor) -> Tensor:
    rows, columns = t.unflatten(1, (img_h, img_w)).chunk(2, -1)
    rows = _turned(rows, *(table[:, :, None] for table in tables[:2]))
    columns = _turned(columns, *(table[:, None] for table in tables[2:]))
    return torch.cat((rows, columns), -1).flatten(1, 2)


def _pair_torch(query: Tensor, key: Tensor, cos_: Tensor, sin_: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos_.transpose(0, 1), sin_.transpose(0, 1)
    return _turned(query, cos, sin), _turned(key, cos, sin)


def _cached_arguments(make: Make, length: int, batch: int, heads: int, size: int) -> dict[str, Any]:
    angles = _angles(make, length, size)
    return {"t": make.normal(length, batch, heads, size), "cos_": angles.cos(), "sin_": angles.sin()}


def _packed_arguments(make: Make, tokens: int, heads: int, size: int) -> dict[str, Any]:
    cuts = (make.uniform(10) * tokens).to(torch.int32).sort().values
    edges = torch.cat((torch.zeros_like(cuts[:1]), cuts, torch.full_like(cuts[:1], tokens)))
    return {"t": make.normal(tokens, heads, size), "cu_seqlens": edges, "freqs": _angles(make, tokens, size)}


def _image_arguments(make: Make, batch: int, rows: int, columns: int, heads: int, size: int) -> dict[str, Any]:
    down, across = (_angles(make, count, size // 2).transpose(0, 1) for count in (rows, columns))
    tables = {"cos_h": down.cos(), "sin_h": down.sin(), "cos_w": across.cos(), "sin_w": across.sin()}
    return {"t": make.normal(batch, rows * columns, heads, size), "img_h": rows, "img_w": columns, **tables}


def _pair_arguments(make: Make, batch: int, length: int, heads: int, size: int, keys: int = 0) -> dict[str, Any]:
    query, key = make.normal(batch, length, heads, size), make.normal(batch, length, keys or heads, size)
    angles = _angles(make, length, size)
    return {"query": query, "key": key, "cos_": angles.cos(), "sin_": angles.sin()}


def _draw(random: Random) -> tuple[int, int, int, int]:
    """Draw length, batches, heads and channels of a head."""
    channels, heads = random.choice((16, 32, 64, 80, 96, 128, 256)), random.size(1, 64)
    tokens = random.size(256, max(256, min(65536, random.most // (heads * channels))))
    batches = random.choice((1, 1, 2, 4, 8))
    return -(-tokens // batches), batches, heads, channels


def _draw_packed(random: Random) -> Sizes:
    length, batches, heads, channels = _draw(random)
    return length * batches, heads, channels


def _draw_pair(random: Random) -> Sizes:
    length, batches, heads, channels = _draw(random)
    return batches, length, heads, channels, random.choice((1, heads))


def _rows(gpu: Sequence[Sizes], cpu: Sequence[Sizes], *others: Row) -> list[Row]:
    forward = [Row("cuda", _BF16, sizes, ["fwd"]) for sizes in gpu]
    return [*forward, *others, *(Row("cpu", dtype, sizes, ["fwd"]) for dtype in (_F32, _BF16) for sizes in cpu)]


def _example(
    name: str, function: Callable[..., Any], arguments: Any, *, elements: Any = None, **others: Any
) -> Example:
    def bytes_moved(dtype: torch.dtype, *sizes: int) -> tuple[int, int]:
        """Return the bytes that forward and backward pass read and write; tables are negligible."""
        both = 2 * (elements or (lambda *sizes: math.prod(sizes)))(*sizes) * dtype.itemsize
        return both, both

    return Example(name, function, arguments, bytes_moved=bytes_moved, strided=True, **others)


_SEQUENCES = "length x batch x heads x size"
_LARGE, _SMALL_ROW = [(4096, 4, 32, 128), (8192, 2, 64, 128)], (512, 2, 8, 128)

EXAMPLES = [
    _example(
        "rope",
        rotary_embedding,
        lambda make, *sizes: {"t": make.normal(*sizes), "freqs": _angles(make, sizes[0], sizes[-1])},
        torch=lambda t, freqs: _turned(t, freqs.cos(), freqs.sin()),
        sizes=_SEQUENCES,
        title="rope sbhd {short} {shape}{way}",
        small=[(8, 2, 4, 32), (7, 3, 5, 22), (1, 1, 1, 2), (1, 3, 32, 32), (48, 2, 6, 48)],
        large=[(1024, 2, 32, 128), (515, 3, 12, 96)],
        draw=_draw,
        listed=_rows(
            _LARGE,
            [_SMALL_ROW],
            Row("cuda", _BF16, _LARGE[0], ["bwd"]),
            Row("cuda", _BF16, (128, 2, 8, 64), ["step"]),
            Row("cpu", _HALF, _SMALL_ROW, ["fwd"]),
            *(Row("cpu", dtype, (64, 2, 8, 64), ["step"]) for dtype in (_F32, _BF16, _HALF)),
        ),
        public=[Public(_FUNCTIONAL, "t", "freqs"), Public("ops:rotary_embedding", "t", "freqs")],
        usual=(2048, 4, 32, 128),
        extensions=["fused_rotary_positional_embedding"],
        asks={"rope.tile": lambda tokens, heads, channels, is_image: (tokens, 1, heads, channels)},
    ),
    _example(
        "rope_cached",
        lambda t, cos_, sin_: rotary_embedding(t, (cos_, sin_)),
        _cached_arguments,
        torch=_turned,
        sizes=_SEQUENCES,
        title="rope sbhd {short} {shape} cached{way}",
        small=[(8, 2, 4, 32)],
        draw=_draw,
        listed=_rows(_LARGE, [_SMALL_ROW]),
        public=[Public(f"{_FUNCTIONAL}_cached", "t", "cos_", "sin_")],
    ),
    _example(
        "rope_thd",
        lambda t, cu_seqlens, freqs: rotary_embedding(t, freqs, cu_seqlens=cu_seqlens),
        _packed_arguments,
        torch=_packed_torch,
        sizes="tokens x heads x size",
        title="rope thd {short} {shape}{way}",
        small=[(23, 4, 32)],
        large=[(3000, 16, 128)],
        draw=_draw_packed,
        listed=_rows([(16384, 32, 128), (16384, 64, 128)], [(1024, 8, 128)]),
        public=[Public(f"{_FUNCTIONAL}_thd", "t", "cu_seqlens", "freqs")],
    ),
    _example(
        "rope_2d",
        lambda t, img_h, img_w, *tables: rotate(t, tables, RopeSpec("image", width=img_w)),
        _image_arguments,
        torch=_image_torch,
        sizes="batch x rows x columns x heads x size",
        title="rope 2d {short} {shape}{way}",
        small=[(2, 3, 5, 4, 32)],
        large=[(3, 32, 40, 16, 80)],
        listed=_rows([(4, 64, 64, 32, 128), (8, 64, 64, 32, 128)], [(2, 16, 32, 8, 128)]),
        public=[Public(f"{_FUNCTIONAL}_2d", "t", "img_h", "img_w", "cos_h", "sin_h", "cos_w", "sin_w")],
    ),
    _example(
        "rope_qk",
        lambda query, key, cos_, sin_: rotary_embedding_pair(query, key, (cos_, sin_), tensor_format="bshd"),
        _pair_arguments,
        torch=_pair_torch,
        sizes="batch x length x heads x size",
        title="rope qk {short} {s[0]}x{s[1]}x{s[2]}+{s[4]}x{s[3]}{way}",
        elements=lambda batch, length, heads, size, keys: batch * length * (heads + keys) * size,
        small=[(2, 9, 4, 32, 2)],
        large=[(2, 1000, 8, 256, 2)],
        draw=_draw_pair,
        listed=[
            Row("cuda", _BF16, (4, 4096, 32, 128, 8), ["fwd"]),
            Row("cuda", _BF16, (2, 128, 8, 64, 2), ["step"]),
        ],
    ),
    _example(
        "rope_pair",
        rotary_embedding_pair,
        lambda make, *sizes: {
            "query": make.normal(*sizes),
            "key": make.normal(*sizes),
            "freqs": _angles(make, sizes[0], sizes[-1]),
        },
        torch=lambda query, key, freqs: tuple(_turned(t, freqs.cos(), freqs.sin()) for t in (query, key)),
        sizes=_SEQUENCES,
        small=[(8, 2, 4, 32)],
        public=[Public("ops:rotary_embedding_pair", "query", "key", "freqs")],
    ),
]
