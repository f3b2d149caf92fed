"""Attention in PyTorch operators, on any device in any floating dtype.

`attention` and `packed_attention` are the definition that all other implementations are tested against: half precision
is computed in float32, float64 in float64, and second derivatives exist. The `sdpa_` functions are used when no kernel
is: they call PyTorch's scaled_dot_product_attention, which is fused and has a first derivative only.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .. import _host
from .._device import SOFTMAX_SUMS_IN_HALF
from .._library import autocast_off, compute_dtype

_LOW_32 = 0xFFFFFFFF
# So large that a probability becomes 0, in float32 and in float64.
_EXCLUDED = 1e30


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, bias: Tensor | None = None, inf: float = 1e9
) -> Tensor:
    """Return softmax(q k^T / sqrt(D) + bias + (mask - 1) * inf) v for [..., H, M or N, D].

    `mask` and `bias` are broadcast to the logits [..., H, M, N].
    """
    return _times_values(_probabilities(query, key, mask, bias, inf), value)


def _times_values(probabilities: Tensor, value: Tensor) -> Tensor:
    return (probabilities @ value.to(probabilities.dtype)).to(value.dtype)


def _probabilities(query: Tensor, key: Tensor, mask: Tensor | None, bias: Tensor | None, inf: float) -> Tensor:
    compute = compute_dtype(query, key, bias)
    logits = query.to(compute) @ key.to(compute).transpose(-1, -2) / math.sqrt(query.shape[-1])
    if bias is not None:
        logits = logits + bias.to(compute)
    if mask is not None:
        logits = logits + (mask.to(compute) - 1) * inf
    return torch.softmax(logits, -1)


def _dropped(values: Tensor, keep: Tensor | None, dropout_p: float) -> Tensor:
    return values if keep is None else torch.where(keep, values / (1 - dropout_p), 0.0)


def packed_attention(qkv: Tensor, cu_seqlens: Tensor, dropout_p: float = 0.0, seed: Tensor | None = None) -> Tensor:
    """Return attention within each sequence of `qkv` [total, 3, H, D], zeros after the last. Reads `cu_seqlens`."""
    bounds = cu_seqlens.tolist()
    outputs = []
    for index, (start, end) in enumerate(pairwise(bounds)):
        query, key, value = qkv[start:end].permute(1, 2, 0, 3)
        keep = None if seed is None else dropout_keep(seed, index, qkv.shape[2], end - start, end - start, dropout_p)
        probabilities = _dropped(_probabilities(query, key, None, None, 0.0), keep, dropout_p)
        outputs.append(_times_values(probabilities, value).transpose(0, 1))
    return torch.cat([*outputs, zero_rows(qkv, bounds[-1])])


def zero_rows(qkv: Tensor, end: int) -> Tensor:
    """Return zeros for the rows after the last sequence, connected to `qkv` so that their gradient is zero too."""
    return qkv[end:, 0].masked_fill(torch.ones((), dtype=torch.bool, device=qkv.device), 0.0)


def dropout_keep(seed: Tensor, sequence: int, heads: int, rows: int, columns: int, dropout_p: float) -> Tensor:
    """Return the probabilities of a sequence that dropout keeps, bool [H, M, N], equal in every implementation.

    Uses a hash of seed, head, row and column: a generator's stream would depend on the order of the tiles.
    """
    here: dict[str, Any] = {"dtype": torch.int64, "device": seed.device}
    heads_ = torch.arange(sequence * heads, (sequence + 1) * heads, **here).view(-1, 1, 1)
    m = torch.arange(rows, **here).view(1, -1, 1)
    n = torch.arange(columns, **here).view(1, 1, -1)
    of_head = _mix(_mix(_mix(seed & _LOW_32) ^ ((seed >> 32) & _LOW_32)) ^ heads_)
    x = (_mix(of_head ^ m) + n * 0x9E3779B9) & _LOW_32
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & _LOW_32
    return x >= 2 * dropout_threshold(dropout_p)


def dropout_threshold(dropout_p: float) -> int:
    """Return half the value that 32 random bits must reach for an element to be kept: an even number."""
    return 2 * min(round(dropout_p * 2**30), 2**30 - 1)


def _mix(x: Tensor) -> Tensor:
    """Return a hash of 32-bit numbers, in int64: a bijection that leaves no pattern behind."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW_32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _LOW_32
    return x ^ (x >> 16)


def sdpa_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None, inf: float
) -> Tensor:
    """Return `attention`, by scaled_dot_product_attention if its gradients are accurate."""
    dtype = query.dtype
    if mask is not None and not _host.on_host(query):
        # For a row whose keys are all masked, PyTorch's fused gradient on a GPU knows only the log of a sum, where
        # `inf` leaves no digits for the number of keys.
        with autocast_off(query):
            return attention(query, key, value, mask, bias, inf)
    if dtype == torch.float16 and mask is not None:
        # float16 cannot hold `inf`: rows without keys would be NaN instead of the average that other dtypes give.
        wide = None if bias is None else bias.float()
        return sdpa_attention(query.float(), key.float(), value.float(), mask, wide, inf).to(dtype)
    added = None if bias is None else bias.to(dtype)
    if mask is not None:
        terms = (mask.to(dtype) - 1) * inf
        added = terms if added is None else added + terms
    return _sdpa(query, key, value, added)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, added: Tensor | None = None) -> Tensor:
    """Call PyTorch's attention with one batch dimension, for its fused versions, and without a second autocast."""
    lead = query.shape[:-3]
    if added is not None:
        added = added.reshape((1,) * (query.dim() - added.dim()) + tuple(added.shape))
        added = added.expand(*lead, *added.shape[-3:]).reshape(math.prod(lead), *added.shape[-3:])
    if len(lead) != 1:
        query, key, value = (t.reshape(math.prod(lead), *t.shape[-3:]) for t in (query, key, value))
    dtype = query.dtype
    if SOFTMAX_SUMS_IN_HALF and dtype.itemsize == 2 and _host.on_host(query):
        query, key, value = query.float(), key.float(), value.float()
        added = None if added is None else added.float()
    with autocast_off(query):
        output = scaled_dot_product_attention(query, key, value, added).to(dtype)
    return output if len(lead) == 1 else output.reshape(*lead, *output.shape[1:])


def sdpa_packed_attention(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float, seed: Tensor | None
) -> Tensor:
    """Return `packed_attention`; pad the sequences if reading `cu_seqlens` would wait for a device."""
    if not _host.on_host(cu_seqlens) or torch.compiler.is_compiling():
        return padded_attention(qkv, cu_seqlens, max_seqlen, dropout_p, seed)
    if seed is not None:
        return packed_attention(qkv, cu_seqlens, dropout_p, seed)
    bounds = cu_seqlens.tolist()
    outputs = [
        _sdpa(*qkv[start:end].permute(1, 2, 0, 3).unsqueeze(1))[0].transpose(0, 1) for start, end in pairwise(bounds)
    ]
    return torch.cat([*outputs, zero_rows(qkv, bounds[-1])])


def padded_attention(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float, seed: Tensor | None, *, sdpa: bool = True
) -> Tensor:
    """Return `packed_attention` without reading `cu_seqlens` on the host: pads every sequence to `max_seqlen`.

    With `sdpa` and without dropout it uses PyTorch's fused attention.
    """
    total = qkv.shape[0]
    if not total:
        return zero_rows(qkv, 0)
    starts, ends = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    rows = starts + torch.arange(max_seqlen, dtype=torch.int64, device=cu_seqlens.device)
    # [sequences, max_seqlen]; never indexes rows that do not exist, whatever the bounds are.
    inside = (rows < ends) & (rows >= 0) & (rows < total)
    # Padding is read from and written to a row of zeros beyond the last row.
    rows = torch.where(inside, rows, total)
    whole = torch.cat((qkv, torch.zeros_like(qkv[:1])))
    query, key, value = whole[rows].permute(2, 0, 3, 1, 4)  # [sequences, H, max_seqlen, D] each
    # Mask of keys; sequences without keys attend to everything, and the result is not used.
    mask = (inside | ~inside.any(1, keepdim=True))[:, None, None, :]
    if sdpa and seed is None:
        output = _sdpa(query, key, value, torch.where(mask, 0.0, float("-inf")).to(qkv.dtype))
    else:
        sequences, heads = query.shape[:2]
        keep = None
        if seed is not None:  # all heads of all sequences are numbered one after the other
            keep = dropout_keep(seed, 0, sequences * heads, max_seqlen, max_seqlen, dropout_p)
            keep = keep.unflatten(0, (sequences, heads))
        probabilities = _dropped(_probabilities(query, key, mask, None, _EXCLUDED), keep, dropout_p)
        output = _times_values(probabilities, value)
    flat = output.transpose(1, 2).flatten(0, 1)
    return flat.new_zeros(total + 1, *flat.shape[1:]).index_add(0, rows.reshape(-1), flat)[:-1]
