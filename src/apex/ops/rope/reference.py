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

from .spec import DIMENSIONS, RopeSpec


def compute_dtype(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def rotate(t: Tensor, tables: Sequence[Tensor], spec: RopeSpec, cu_seqlens: Tensor | None = None) -> Tensor:
    """The rotated tensor; `tables` are the angles, or cosines and sines, the latter two per image dimension."""
    compute = compute_dtype(t)
    pieces = []
    done = 0
    for cos, sin in cosines_and_sines(t, tables, spec, cu_seqlens, compute):
        half = cos.shape[-1] // 2
        first, second = t[..., done : done + half].to(compute), t[..., done + half : done + 2 * half].to(compute)
        (cos_first, cos_second), (sin_first, sin_second) = cos.split(half, -1), sin.split(half, -1)
        if spec.inverse:
            sin_first, sin_second = -sin_second, -sin_first
        pieces += [first * cos_first - second * sin_first, second * cos_second + first * sin_second]
        done += 2 * half
    result = torch.cat([*(piece.to(t.dtype) for piece in pieces), t[..., done:]], -1)
    return result.transpose(0, 1).contiguous().transpose(0, 1) if spec.swap_memory else result


def cosines_and_sines(
    t: Tensor, tables: Sequence[Tensor], spec: RopeSpec, cu_seqlens: Tensor | None, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Per part of the channels its cosines and sines, in a shape that broadcasts against `t`."""
    pairs = [tuple(tables[i : i + 2]) for i in range(0, len(tables), 2)]
    token_dim = DIMENSIONS[spec.layout][0]
    tokens = t.shape[token_dim]
    shape = [1] * t.dim()
    shape[token_dim] = tokens
    result = []
    for part, pair in enumerate(pairs):
        rotated = pair[0].shape[-1]
        rows = [table.reshape(-1, rotated) for table in pair]
        if len(rows) == 1:
            angles = rows[0].to(torch.promote_types(rows[0].dtype, torch.float32))
            rows = [angles.cos(), angles.sin()]
        rows = [row.to(dtype) for row in rows]
        if spec.layout == "thd":
            assert cu_seqlens is not None
            rows = _of_packed(rows, tokens, cu_seqlens)
        elif spec.layout == "image":
            token = torch.arange(tokens, device=t.device)
            position = token % spec.width if part else token // max(1, spec.width)
            rows = [row[position] for row in rows]
        shape[-1] = rotated
        result.append((rows[0].reshape(shape), rows[1].reshape(shape)))
    return result


def _of_packed(rows: list[Tensor], tokens: int, cu_seqlens: Tensor) -> list[Tensor]:
    """Rows of cosines and sines by each token's position in its sequence.

    A token before the first sequence or after the last one is not rotated; a position beyond the table gives NaN.
    """
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
    position = token - cu_seqlens[sequence.clamp(min=0)]
    outside = ((sequence < 0) | (token >= cu_seqlens[-1]))[:, None]
    beyond = (position >= len(rows[0]))[:, None]
    if not len(rows[0]):
        rows = [row.new_zeros((1, row.shape[1])) for row in rows]
    known = position.clamp(0, len(rows[0]) - 1)
    return [
        torch.where(outside, unrotated, torch.where(beyond, float("nan"), row[known]))
        for row, unrotated in zip(rows, (1.0, 0.0), strict=True)
    ]
