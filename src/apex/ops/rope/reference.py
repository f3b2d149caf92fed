"""Rotary position embeddings in PyTorch operators: the definition that other implementations are tested against.

Runs on any device in any floating dtype; half precision is computed in float32, float64 in float64. Channel i of the
first half is paired with channel i of the second half, or channel 2i with its neighbour, each with an angle of its own:

    first' = first cos(a) - second sin(a)        second' = second cos(b) + first sin(b)

which is a rotation if a = b, as it is in models. Its transpose takes gradients back.

s: tokens of a sequence, b: batch, h: heads, d: channels of a head, t: tokens of all sequences, r: rotated channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._library import compute_dtype


class RopeSpec(NamedTuple):
    """The settings of a rotation, without its tensors.

    `layout`: "sbhd", "bshd", "thd" (packed sequences) or "image" [b, rows * columns, h, d]. `swap_memory`: the first
    two dimensions of the result are swapped in memory. `inverse`: the transpose of the rotation, which takes gradients
    back. `width`: the width of an image, in tokens. `pairs`: how the two channels of a pair lie in the input and in the
    result, one of the keys of `TRANSPOSED_PAIRS`; tables are always in halves. Images and packed sequences are in
    halves.
    """

    layout: str
    swap_memory: bool = False
    inverse: bool = False
    width: int = 0
    pairs: str = "halves"


# The `pairs` of a rotation, and the `pairs` of its transpose.
TRANSPOSED_PAIRS = {
    "halves": "halves",
    "neighbours": "neighbours",
    "neighbours to halves": "halves to neighbours",
    "halves to neighbours": "neighbours to halves",
}


def rotate(t: Tensor, tables: Sequence[Tensor], spec: RopeSpec, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return the rotated tensor; `tables` are the angles, or cosines and sines, two of each for images."""
    wide = t.to(compute_dtype(t))
    cos, sin = _cosines_and_sines(t, tables, spec, cu_seqlens, wide.dtype)
    rotated = cos.shape[-1]
    if spec.layout == "image":
        result = _turned(wide.unflatten(-1, (2, rotated)), cos, sin, spec.inverse).flatten(-2)
    else:
        result = wide if rotated == t.shape[-1] else wide[..., :rotated]
        if spec.pairs.startswith("neighbours"):
            result = result.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        result = _turned(result, cos, sin, spec.inverse)
        if spec.pairs.endswith("neighbours"):
            result = result.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        if rotated != t.shape[-1]:
            result = torch.cat((result, wide[..., rotated:]), -1)
    if cu_seqlens is not None:
        # Tokens outside all sequences are copied: by the formula infinity and NaN would spread between channels.
        token = torch.arange(t.shape[0], device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        outside = (token < cu_seqlens[0]) | (token >= cu_seqlens[-1])
        result = torch.where(outside[:, None, None], wide, result)
    result = result.to(t.dtype)
    return result.transpose(0, 1).contiguous().transpose(0, 1) if spec.swap_memory else result.contiguous()


def _turned(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    # The minus sign goes to the sines, the smallest tensor, and roll swaps the halves.
    sin_first, sin_second = sin.chunk(2, -1)
    sin = torch.cat((-sin_first, sin_second), -1)
    half = (x.shape[-1] // 2,)  # a tensor in torch.jit.trace, which up to PyTorch 2.9 roll takes only in a tuple
    if inverse:
        return x * cos + (x * sin).roll(half, -1)
    return torch.addcmul(x * cos, x.roll(half, -1), sin)


def _cosines_and_sines(
    t: Tensor, tables: Sequence[Tensor], spec: RopeSpec, cu_seqlens: Tensor | None, dtype: torch.dtype
) -> Sequence[Tensor]:
    """Return cosines and sines that broadcast against `t`; for images, against channels of rows and of columns."""
    if len(tables) == 1:
        angles = tables[0].to(torch.promote_types(tables[0].dtype, dtype))
        tables = angles.cos(), angles.sin()
    tables = [table.to(dtype) for table in tables]
    if spec.layout == "image":
        token = torch.arange(t.shape[1], dtype=torch.int64, device=t.device)
        row = token // max(1, spec.width)
        column = token - row * spec.width
        return [
            torch.stack((rows[:, row], columns[:, column]), -2)
            for rows, columns in zip(tables[:2], tables[2:], strict=True)
        ]
    if spec.layout == "thd":
        assert cu_seqlens is not None
        return _of_packed(tables, t.shape[0], cu_seqlens)
    if spec.layout == "bshd":
        return [table.reshape(1, -1, 1, table.shape[-1]) for table in tables]
    return [table[:, None, None] for table in tables] if tables[0].dim() == 2 else tables


def _of_packed(tables: Sequence[Tensor], tokens: int, cu_seqlens: Tensor) -> list[Tensor]:
    """Return rows of cosines and sines by each token's position in its sequence.

    A token before the first sequence or after the last one is not rotated. A position beyond the table gives NaN. So do
    edges that decrease or are below zero, for which the search does not find the start of a sequence.
    """
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens.contiguous(), token, right=True) - 1
    start = cu_seqlens[sequence.clamp(min=0)]
    position = token - start
    positions, channels = tables[0].shape[0], tables[0].shape[-1]
    outside = (sequence < 0) | (token >= cu_seqlens[-1])
    known = (start >= 0) & (position >= 0) & (position < positions)
    row = torch.where(outside, positions + 1, torch.where(known, position, positions))
    result = []
    for table, unrotated in zip(tables, (1.0, 0.0), strict=True):
        more = table.new_full((2, channels), float("nan"))
        more[1] = unrotated
        result.append(torch.cat((table.reshape(-1, channels), more))[row, None])
    return result
