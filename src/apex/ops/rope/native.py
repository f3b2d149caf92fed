"""Rotary position embeddings where there is no kernel: PyTorch operators that make few passes over memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import reference
from .reference import compute_dtype, cosines_and_sines
from .spec import DIMENSIONS, RopeSpec, empty_result

# Below this many elements the number of operators counts, and the plain formula has the fewest.
_SMALL = 1 << 15
# Elements of a piece in half precision: its float32 copies stay in a processor's cache.
_PIECE = 1 << 17


def takes_operators(t: Tensor, spec: RopeSpec) -> bool:
    """Whether the few autograd nodes of the plain formula cost less than one of our own.

    Only where their gradients lie in memory as ours would.
    """
    return t.numel() < _SMALL and type(t) is Tensor and not spec.swap_memory and t.is_contiguous()


def rotate(t: Tensor, tables: Sequence[Tensor], spec: RopeSpec, cu_seqlens: Tensor | None = None) -> Tensor:
    """The rotated tensor, without autograd."""
    check_lengths(tables[0], cu_seqlens)
    if t.numel() < _SMALL:
        return reference.rotate(t, tables, spec, cu_seqlens)
    compute = compute_dtype(t)
    parts = cosines_and_sines(t, tables, spec, cu_seqlens, compute)
    result = empty_result(t, spec.swap_memory)
    rotated = 2 * len(parts) * (tables[0].shape[-1] // 2)
    if t.dtype == compute:
        _rotate_piece(t, result, parts, spec.inverse)
    else:
        token_dim = DIMENSIONS[spec.layout][0]
        tokens = t.shape[token_dim]
        step = max(1, _PIECE * tokens // t.numel()) if t.device.type == "cpu" else tokens
        wide = torch.empty_like(t.narrow(token_dim, 0, min(step, tokens))[..., :rotated], dtype=compute)
        turned = torch.empty_like(wide)
        pieces = [tensor[..., :rotated].split(step, token_dim) for tensor in (t, result)]
        angles = [[table.split(step, token_dim) for table in part] for part in parts]
        for index, (source, target) in enumerate(zip(*pieces, strict=True)):
            if source.shape[token_dim] < step:  # the last one
                wide, turned = (tensor.narrow(token_dim, 0, source.shape[token_dim]) for tensor in (wide, turned))
            wide.copy_(source)
            _rotate_piece(wide, turned, [(cos[index], sin[index]) for cos, sin in angles], spec.inverse)
            target.copy_(turned)
    if rotated < t.shape[-1]:
        result[..., rotated:] = t[..., rotated:]
    return result


def _rotate_piece(source: Tensor, target: Tensor, parts: Sequence[tuple[Tensor, Tensor]], inverse: bool) -> None:
    """The product of each half with its cosines, to which the other half's with the sines is added: two passes."""
    sign = -1 if inverse else 1
    offset = 0
    for cos, sin in parts:
        half = cos.shape[-1] // 2
        first, second = source.narrow(-1, offset, half), source.narrow(-1, offset + half, half)
        (cos_first, cos_second), (sin_first, sin_second) = cos.chunk(2, -1), sin.chunk(2, -1)
        if inverse:
            sin_first, sin_second = sin_second, sin_first
        torch.mul(first, cos_first, out=target.narrow(-1, offset, half)).addcmul_(second, sin_first, value=-sign)
        torch.mul(second, cos_second, out=target.narrow(-1, offset + half, half)).addcmul_(
            first, sin_second, value=sign
        )
        offset += 2 * half


def check_lengths(table: Tensor, cu_seqlens: Tensor | None) -> None:
    """On a processor the lengths are at hand; elsewhere reading them would wait for the device."""
    if cu_seqlens is None or cu_seqlens.device.type != "cpu" or cu_seqlens.numel() < 2:
        return
    longest = int(cu_seqlens.diff().max())
    if longest > table.shape[0]:
        raise ValueError(
            f"cu_seqlens has a sequence of {longest} tokens, the table of angles has {table.shape[0]} positions"
        )
