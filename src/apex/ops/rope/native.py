"""Rotary position embeddings where there is no kernel: PyTorch operators that make few passes over memory."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .._checks import values_at_hand
from . import reference
from .reference import compute_dtype, cosines_and_sines, outside_sequences
from .spec import DIMENSIONS, RopeSpec, empty_result

# Below this many elements the number of operators counts, and the plain formula has the fewest.
_SMALL = 1 << 17
# Elements of a piece in half precision, per thread: their float32 copies stay in a core's cache.
_PIECE = 1 << 17
# On Arm PyTorch has a slow way between contiguous float16 and float32 (65536 elements: 125 us, back 202) and a quick
# one where either is not contiguous, such as rows of channels with gaps between them (23, back 31). bfloat16 has no
# slow one.
_NEEDS_GAPS = platform.machine() in ("aarch64", "arm64")
_GAP = 16
_SMALL_FLOAT16 = 1 << 13


def takes_operators(t: Tensor, spec: RopeSpec) -> bool:
    """Whether the few autograd nodes of the plain formula cost less than one of our own.

    Only where their gradients lie in memory as ours would.
    """
    return (
        t.numel() < _SMALL
        and t.dtype == torch.float32
        and type(t) is Tensor
        and not spec.swap_memory
        and t.is_contiguous()
    )


def rotate(t: Tensor, tables: Sequence[Tensor], spec: RopeSpec, cu_seqlens: Tensor | None = None) -> Tensor:
    """The rotated tensor, without autograd."""
    check_lengths(tables[0], cu_seqlens)
    if t.numel() < (_SMALL_FLOAT16 if t.dtype == torch.float16 and _NEEDS_GAPS else _SMALL):
        return reference.rotate(t, tables, spec, cu_seqlens)
    compute = compute_dtype(t)
    cos, sin = cosines_and_sines(t, tables, spec, cu_seqlens, compute)
    result = empty_result(t, spec.swap_memory)
    parts = (2, cos.shape[-1]) if spec.layout == "image" else None  # channels of rows, of columns
    rotated = cos.shape[-1] * (1 if parts is None else 2)
    token_dim = DIMENSIONS[spec.layout][0]
    if t.dtype == compute:
        source, target = (t, result) if parts is None else (t.unflatten(-1, parts), result.unflatten(-1, parts))
        _rotate_piece(source, target, cos, sin, spec.inverse)
    else:
        tokens = t.shape[token_dim]
        on_cpu = t.device.type == "cpu"
        step = max(1, _PIECE * torch.get_num_threads() * tokens // t.numel()) if on_cpu else tokens
        whole = [t, result, cos, sin]
        if rotated < t.shape[-1]:
            whole[:2] = t[..., :rotated], result[..., :rotated]
        pieces = [(tensor,) if step >= tokens else tensor.split(step, token_dim) for tensor in whole]
        gap = _GAP if _NEEDS_GAPS and on_cpu and t.dtype == torch.float16 else 0
        wide, turned = _two_buffers(pieces[0][0], compute, gap)
        for source, target, cosines, sines in zip(*pieces, strict=True):
            if source.shape[token_dim] < wide.shape[token_dim]:  # the last one
                wide, turned = (tensor.narrow(token_dim, 0, source.shape[token_dim]) for tensor in (wide, turned))
            wide.copy_(source)
            if parts is None:
                _rotate_piece(wide, turned, cosines, sines, spec.inverse)
            else:
                _rotate_piece(wide.unflatten(-1, parts), turned.unflatten(-1, parts), cosines, sines, spec.inverse)
            target.copy_(turned)
    if rotated < t.shape[-1]:
        result[..., rotated:] = t[..., rotated:]
    outside = None if cu_seqlens is None else outside_sequences(t.shape[0], cu_seqlens)
    if outside is not None:
        torch.where(outside[:, None, None], t, result, out=result)
    return result


def _two_buffers(like: Tensor, dtype: torch.dtype, gap: int) -> tuple[Tensor, ...]:
    """Room for the elements of `like` in `dtype`, twice, with a gap behind the channels of every head."""
    *outer, channels = like.shape
    buffers = torch.empty((2, *outer, channels + gap), dtype=dtype, device=like.device)
    return (buffers[..., :channels] if gap else buffers).unbind()


def _rotate_piece(source: Tensor, target: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> None:
    """Products with the cosines, to which those of the other half with the sines are added: two passes."""
    rotated = cos.shape[-1]
    if rotated < source.shape[-1]:
        source, target = source[..., :rotated], target[..., :rotated]
    (first, second), (target_first, target_second) = source.chunk(2, -1), target.chunk(2, -1)
    sin_first, sin_second = sin.chunk(2, -1)
    sign = 1
    if inverse:
        sin_first, sin_second, sign = sin_second, sin_first, -1
    torch.mul(source, cos, out=target)
    target_first.addcmul_(second, sin_first, value=-sign)
    target_second.addcmul_(first, sin_second, value=sign)


def check_lengths(table: Tensor, cu_seqlens: Tensor | None) -> None:
    """On a processor the lengths are at hand; elsewhere reading them would wait for the device."""
    edges = None if cu_seqlens is None else values_at_hand(cu_seqlens)
    if not edges:
        return
    lengths = [end - start for start, end in pairwise(edges)]
    if edges[0] < 0 or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens={edges} must grow from zero or more")
    longest = max(lengths, default=0)
    if longest > table.shape[0]:
        raise ValueError(
            f"cu_seqlens has a sequence of {longest} tokens, the table of angles has {table.shape[0]} positions"
        )
