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

from .. import _transfer
from .spec import RopeSpec


def compute_dtype(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def rotate(t: Tensor, tables: Sequence[Tensor], spec: RopeSpec, cu_seqlens: Tensor | None = None) -> Tensor:
    """The rotated tensor; `tables` are the angles, or cosines and sines, the latter two per image dimension."""
    dtype, compute = t.dtype, compute_dtype(t)
    wide = t if dtype == compute else t.to(compute)
    cos, sin = cosines_and_sines(t, tables, spec, cu_seqlens, compute)
    rotated = cos.shape[-1]
    if spec.layout == "image":
        result = _turned(wide.unflatten(-1, (2, rotated)), cos, sin, spec.inverse).flatten(-2)
    elif rotated == t.shape[-1]:
        result = _turned(wide, cos, sin, spec.inverse)
    else:
        result = torch.cat((_turned(wide[..., :rotated], cos, sin, spec.inverse), wide[..., rotated:]), -1)
    outside = None if cu_seqlens is None else outside_sequences(t.shape[0], cu_seqlens)
    if outside is not None:  # not the formula's, in which infinity and NaN would spread from channel to channel
        result = torch.where(outside[:, None, None], wide, result)
    if dtype != compute:
        result = result.to(dtype)
    return result.transpose(0, 1).contiguous().transpose(0, 1) if spec.swap_memory else result.contiguous()


def _turned(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    # The minus sign goes to the sines, of which there are fewest, and roll swaps the halves.
    sin_first, sin_second = sin.chunk(2, -1)
    sin = torch.cat((-sin_first, sin_second), -1)
    half = (x.shape[-1] // 2,)  # torch.jit.trace makes it a tensor, which up to PyTorch 2.9 roll takes in a tuple only
    if inverse:
        return x * cos + (x * sin).roll(half, -1)
    return torch.addcmul(x * cos, x.roll(half, -1), sin)


def as_cosines(tables: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """Cosines and sines of tables that may be angles, in `dtype` or a wider one."""
    if len(tables) != 1:
        return tables
    angles = tables[0]
    angles = angles.to(torch.promote_types(angles.dtype, dtype))
    return angles.cos(), angles.sin()


def cosines_and_sines(
    t: Tensor, tables: Sequence[Tensor], spec: RopeSpec, cu_seqlens: Tensor | None, dtype: torch.dtype
) -> Sequence[Tensor]:
    """Cosines and sines in a shape that broadcasts against `t`; of images, against channels of rows and of columns."""
    tables = as_cosines(tables, dtype)
    if any(table.dtype != dtype for table in tables):
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


def outside_sequences(tokens: int, cu_seqlens: Tensor) -> Tensor | None:
    """True for tokens of no sequence; None where it is known, without waiting for a device, that there are none."""
    known = _transfer.on_host(cu_seqlens) and type(cu_seqlens) is Tensor and not torch.jit.is_tracing()
    if known and int(cu_seqlens[0]) <= 0 and int(cu_seqlens[-1]) >= tokens:
        return None
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return (token < cu_seqlens[0]) | (token >= cu_seqlens[-1])


def _of_packed(tables: Sequence[Tensor], tokens: int, cu_seqlens: Tensor) -> list[Tensor]:
    """Rows of cosines and sines by each token's position in its sequence.

    A token before the first sequence or after the last one is not rotated. A position beyond the table gives NaN, and
    so do edges that fall or are below zero, where what the search finds is no start of a sequence.
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
