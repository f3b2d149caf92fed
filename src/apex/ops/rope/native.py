"""Rotary position embeddings where there is no kernel: PyTorch operators on pieces that stay in a processor's cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .reference import compute_dtype, cosines_and_sines
from .spec import DIMENSIONS, RopeSpec, empty_result

# Elements of a piece: with its float32 copies 1 MiB, which a core's cache holds.
_PIECE = 1 << 17


def rotate(t: Tensor, tables: Sequence[Tensor], spec: RopeSpec, cu_seqlens: Tensor | None = None) -> Tensor:
    """The rotated tensor, without autograd."""
    on_cpu = t.device.type == "cpu"
    if on_cpu and cu_seqlens is not None:
        _check_lengths(cu_seqlens, tables[0])
    result = empty_result(t, spec.swap_memory)
    if not t.numel():
        return result
    compute = compute_dtype(t)
    parts = cosines_and_sines(t, tables, spec, cu_seqlens, compute)
    token_dim = DIMENSIONS[spec.layout][0]
    tokens = t.shape[token_dim]
    step = max(1, _PIECE * tokens // t.numel()) if on_cpu else tokens
    for start in range(0, tokens, step):
        length = min(step, tokens - start)

        def piece(tensor: Tensor, start: int = start, length: int = length) -> Tensor:
            return tensor.narrow(token_dim, start, length)

        source, target = piece(t), piece(result)
        wide = source if t.dtype == compute else source.to(compute)
        rotated = target if t.dtype == compute else torch.empty_like(wide)
        done = 0
        for cos, sin in parts:
            cos, sin = piece(cos), piece(sin)
            _rotate_halves(wide, rotated, cos, sin, done, spec.inverse)
            done += cos.shape[-1]
        if rotated is not target:
            target[..., :done] = rotated[..., :done]
        if done < t.shape[-1]:
            target[..., done:] = source[..., done:]
    return result


def _rotate_halves(wide: Tensor, rotated: Tensor, cos: Tensor, sin: Tensor, offset: int, inverse: bool) -> None:
    half = cos.shape[-1] // 2
    first, second = wide.narrow(-1, offset, half), wide.narrow(-1, offset + half, half)
    (cos_first, cos_second), (sin_first, sin_second) = cos.split(half, -1), sin.split(half, -1)
    sign = 1
    if inverse:
        sin_first, sin_second, sign = sin_second, sin_first, -1
    torch.mul(first, cos_first, out=rotated.narrow(-1, offset, half)).addcmul_(second, sin_first, value=-sign)
    torch.mul(second, cos_second, out=rotated.narrow(-1, offset + half, half)).addcmul_(first, sin_second, value=sign)


def _check_lengths(cu_seqlens: Tensor, table: Tensor) -> None:
    """On a processor the lengths are at hand; elsewhere reading them would wait for the device."""
    if cu_seqlens.numel() > 1 and int(cu_seqlens.diff().max()) > table.shape[0]:
        raise ValueError(
            f"cu_seqlens has a sequence of {int(cu_seqlens.diff().max())} tokens, the table of angles has "
            f"{table.shape[0]} positions"
        )
