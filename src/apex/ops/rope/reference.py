"""Rotary position embeddings in PyTorch operators: the definition that everything else is held against.

Runs on any device in any floating dtype; half precision is computed in float32, float64 in float64. Channel i of the
first half is paired with channel i of the second one, each with an angle of its own:

    first' = first cos(a) - second sin(a)        second' = second cos(b) + first sin(b)

which is a rotation where a = b, as it is in models. Its transpose takes gradients back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .spec import RopeSpec


def compute_dtype(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def rotate(t: Tensor, tables: Sequence[Tensor], spec: RopeSpec, cu_seqlens: Tensor | None = None) -> Tensor:
    """The rotated tensor; `tables` are the angles, or cosines and sines, the latter two per image dimension."""
    dtype, compute = t.dtype, compute_dtype(t)
    wide = t if dtype == compute else t.to(compute)
    parts = cosines_and_sines(t, tables, spec, cu_seqlens, compute)
    rotated = parts[0][0].shape[-1]
    done = rotated * len(parts)
    if done == t.shape[-1] and len(parts) == 1:
        result = _turned(wide, *parts[0], spec.inverse)
    else:
        pieces = wide[..., :done].split(rotated, -1)
        turned = [_turned(piece, *part, spec.inverse) for piece, part in zip(pieces, parts, strict=True)]
        result = torch.cat((*turned, wide[..., done:]), -1)
    if dtype != compute:
        result = result.to(dtype)
    return result.transpose(0, 1).contiguous().transpose(0, 1) if spec.swap_memory else result.contiguous()


def _turned(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    if inverse:
        first, second = (x * sin).chunk(2, -1)
        return x * cos + torch.cat((second, -first), -1)
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat((-second, first), -1), sin)


def cosines_and_sines(
    t: Tensor, tables: Sequence[Tensor], spec: RopeSpec, cu_seqlens: Tensor | None, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Per part of the channels its cosines and sines, in a shape that broadcasts against `t`."""
    if len(tables) == 1:
        angles = tables[0]
        if angles.dtype in (torch.float16, torch.bfloat16):
            angles = angles.to(torch.float32)
        tables = (angles.cos(), angles.sin())
    if any(table.dtype != dtype for table in tables):
        tables = [table.to(dtype) for table in tables]
    if spec.layout == "image":
        token = torch.arange(t.shape[1], device=t.device)
        rows = token // max(1, spec.width)
        columns = token - rows * spec.width
        return [
            (cos[:, position], sin[:, position]) for cos, sin, position in ((*tables[:2], rows), (*tables[2:], columns))
        ]
    if spec.layout == "thd":
        assert cu_seqlens is not None
        tables = [table[:, None] for table in _of_packed(tables, t.shape[0], cu_seqlens)]
    elif spec.layout == "bshd":
        tables = [table.reshape(1, -1, 1, table.shape[-1]) for table in tables]
    elif tables[0].dim() == 2:
        tables = [table[:, None, None] for table in tables]
    return [(tables[0], tables[1])]


def _of_packed(tables: Sequence[Tensor], tokens: int, cu_seqlens: Tensor) -> list[Tensor]:
    """Rows of cosines and sines by each token's position in its sequence.

    A token before the first sequence or after the last one is not rotated; a position beyond the table gives NaN.
    """
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens.contiguous(), token, right=True) - 1
    position = token - cu_seqlens[sequence.clamp(min=0)]
    rows = [table.reshape(-1, table.shape[-1]) for table in tables]
    outside = ((sequence < 0) | (token >= cu_seqlens[-1]))[:, None]
    beyond = (position >= len(rows[0]))[:, None]
    if not len(rows[0]):
        rows = [row.new_zeros((1, row.shape[1])) for row in rows]
    known = position.clamp(0, len(rows[0]) - 1)
    return [
        torch.where(outside, unrotated, torch.where(beyond, float("nan"), row[known]))
        for row, unrotated in zip(rows, (1.0, 0.0), strict=True)
    ]
