"""Attention in PyTorch operators, on any device in any floating dtype.

`attention` and `packed_attention` are the definition that all other implementations are tested against: half precision
is computed in float32, float64 in float64, and second derivatives exist. The `sdpa_` functions are used when no kernel
is: they call PyTorch's scaled_dot_product_attention, which is fused and has a first derivative only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
        # For a row whose keys are all masked, PyTorch's fused gradient on a GPU uses the log of a sum, and `inf`
        # leaves no digits in it for the number of keys.
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


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    grouped: bool = False,
) -> Tensor:
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
        options = {"is_causal": causal, "scale": scale, "enable_gqa": grouped}
        output = scaled_dot_product_attention(query, key, value, added, **options)  # type: ignore[arg-type]
    output = output if output.dtype == dtype else output.to(dtype)
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


def batched_attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Return PyTorch's attention of a batch [Z, H, length, D]; keys and values may have fewer heads."""
    return _sdpa(query, key, value, causal=causal, scale=scale, grouped=query.shape[1] != key.shape[1])


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
    # [sequences, max_seqlen]; no value of the bounds makes this index rows that do not exist.
    inside = (rows < ends) & (rows >= 0) & (rows < total)
    # Padding is read from and written to a row of zeros beyond the last row.
    rows = torch.where(inside, rows, total)
    whole = torch.cat((qkv, torch.zeros_like(qkv[:1])))
    query, key, value = whole[rows].permute(2, 0, 3, 1, 4)  # [sequences, H, max_seqlen, D] each
    # Mask of keys; sequences without keys attend to everything, and the result is not used.
    mask = (inside | ~inside.any(1, keepdim=True))[:, None, None, :]
    if sdpa and seed is None:
        added = torch.zeros(mask.shape, dtype=qkv.dtype, device=qkv.device).masked_fill_(~mask, float("-inf"))
        output = _sdpa(query, key, value, added)
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


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: tuple[list[int], list[int]],
    scale: float,
    left: int = -1,
    right: int = -1,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention within packed sequences, and the log of each row's sum of exponentials [H, total].

    `bounds` are the edges of the sequences of queries and of keys. The last query of a sequence has the position of its
    last key. A query sees keys from `left` before its own position to `right` after it, -1 for all.
    """
    heads, outputs, sums = query.shape[1], [], []
    compute = compute_dtype(query, key)
    for index, (of_queries, of_keys) in enumerate(zip(pairwise(bounds[0]), pairwise(bounds[1]), strict=True)):
        q = query[slice(*of_queries)].to(compute).transpose(0, 1)
        k, v = (_repeated(t[slice(*of_keys)], heads).to(compute).transpose(0, 1) for t in (key, value))
        rows, columns = q.shape[1], k.shape[1]
        logits = (q @ k.transpose(1, 2) * scale).masked_fill(~_sees(rows, columns, left, right, q.device), -torch.inf)
        keep = None if seed is None else dropout_keep(seed, index, heads, rows, columns, dropout_p)
        outputs.append((_dropped(_softmax_or_zeros(logits), keep, dropout_p) @ v).transpose(0, 1))
        sums.append(logits.detach().logsumexp(2) if columns else logits.new_full((heads, rows), -torch.inf))
    end = bounds[0][-1]
    sums.append(query.new_full((heads, query.shape[0] - end), -torch.inf, dtype=compute))
    tail = query[end:].masked_fill(torch.ones((), dtype=torch.bool, device=query.device), 0.0).to(compute)
    return torch.cat([*outputs, tail]).to(query.dtype), torch.cat(sums, 1)


def varlen_attention_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    bounds: tuple[list[int], list[int]],
    scale: float,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `varlen_attention` from its output and logs of sums.

    Both may belong to a whole attention with these keys as a part; the gradients of all parts then add up.
    """
    heads, group = query.shape[1], query.shape[1] // key.shape[1]
    dquery, dkey, dvalue = (torch.zeros_like(tensor, dtype=lse.dtype) for tensor in (query, key, value))
    delta = (dout.to(lse.dtype) * output.to(lse.dtype)).sum(-1).transpose(0, 1)
    for of_queries, of_keys in zip(pairwise(bounds[0]), pairwise(bounds[1]), strict=True):
        queries, keys = slice(*of_queries), slice(*of_keys)
        q, g = (tensor[queries].to(lse.dtype).transpose(0, 1) for tensor in (query, dout))
        k, v = (_repeated(tensor[keys], heads).to(lse.dtype).transpose(0, 1) for tensor in (key, value))
        seen = _sees(q.shape[1], k.shape[1], left, right, q.device)
        logits = (q @ k.transpose(1, 2) * scale - lse[:, queries, None]).masked_fill(~seen, -torch.inf)
        p = logits.exp().nan_to_num(0.0)  # rows that see no key have -inf in both
        ds = p * (g @ v.transpose(1, 2) - delta[:, queries, None]) * scale
        dquery[queries] += (ds @ k).transpose(0, 1)
        for total, part in ((dkey, ds.transpose(1, 2) @ q), (dvalue, p.transpose(1, 2) @ g)):
            total[keys] += part.transpose(0, 1).unflatten(1, (-1, group)).sum(2)
    return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype)


def merged(parts: Sequence[Any], places: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return `op_blocks.merge_parts`: the sum of results, weighted by their shares of the sum of exponentials."""
    compute = compute_dtype(parts[0].result)
    results = [_in_places(part.result, places if part.partial else None, 0.0).to(compute) for part in parts]
    if parts[0].lse is None:
        return sum(results[1:], results[0]).to(dtype), None
    logs = [_in_places(part.lse.transpose(0, 1), places if part.partial else None, -torch.inf) for part in parts]
    lse = torch.stack(logs).logsumexp(0)  # [rows, H]
    weights = [(log - lse).exp().nan_to_num(0.0)[..., None] for log in logs]  # rows that see no key have -inf in both
    total = sum(result * weight for result, weight in zip(results, weights, strict=True))
    return total.to(dtype), lse.transpose(0, 1).contiguous()  # type: ignore[union-attr]


def _in_places(tensor: Tensor, places: Tensor | None, missing: float) -> Tensor:
    """Return the rows of a tensor at `places`, `missing` where a place is -1."""
    if places is None:
        return tensor
    absent = (places < 0).view(-1, *(1,) * (tensor.dim() - 1))
    return tensor[places.clamp(min=0)].masked_fill(absent, missing)


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    """Return keys or values [..., key heads, D] with each head repeated for the heads of queries that share it."""
    return tensor if tensor.shape[-2] == heads else tensor.repeat_interleave(heads // tensor.shape[-2], -2)


def _sees(rows: int, columns: int, left: int, right: int, device: torch.device) -> Tensor:
    """Return whether each of the queries sees each key, bool [rows, columns]."""
    position = torch.arange(rows, dtype=torch.int64, device=device)[:, None] + (columns - rows)
    return _in_window(torch.arange(columns, dtype=torch.int64, device=device) - position, left, right)


def _in_window(distance: Tensor, left: int, right: int) -> Tensor:
    """Return whether a key at this distance behind a query's position is seen."""
    inside = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        inside = inside & (distance >= -left)
    if right >= 0:
        inside = inside & (distance <= right)
    return inside


def _softmax_or_zeros(logits: Tensor) -> Tensor:
    """Return the softmax of the last dimension, zeros for rows that are -inf; their gradients are zeros, too."""
    if not logits.shape[-1]:
        return logits
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    return logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)


def sdpa_varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[Any, ...], masks: tuple[Any, ...], with_lse: bool
) -> tuple[Tensor, Tensor]:
    """Return `varlen_attention`, by PyTorch's attention if possible, and the logs of sums if `with_lse`.

    `lengths` are the bounds of queries and keys and the greatest lengths of both; `masks` are scale, `left`, `right`,
    dropout's probability and seed. Sequences are padded if reading the bounds would wait for a device.
    """
    bounds, bounds_k, _, _ = lengths
    scale, left, right, _, seed = masks
    if not _host.on_host(bounds) or torch.compiler.is_compiling():
        return padded_varlen_attention(query, key, value, lengths, masks)
    edges = (bounds.tolist(), bounds_k.tolist())
    if with_lse or seed is not None:
        return varlen_attention(query, key, value, edges, *masks)
    heads, outputs = query.shape[1], []
    for of_queries, of_keys in zip(pairwise(edges[0]), pairwise(edges[1]), strict=True):
        q = query[slice(*of_queries)].transpose(0, 1)[None]
        k, v = (_repeated(t[slice(*of_keys)], heads).transpose(0, 1)[None] for t in (key, value))
        rows, columns = q.shape[2], k.shape[2]
        seen = _sees(rows, columns, left, right, q.device)
        if not rows or not columns or (rows > columns and right >= 0):  # rows without keys: PyTorch returns NaN
            single = (edge_of(of_queries), edge_of(of_keys))
            own = (query[slice(*of_queries)], key[slice(*of_keys)], value[slice(*of_keys)])
            outputs.append(varlen_attention(*own, single, *masks)[0])
            continue
        causal = rows == columns and (left, right) == (-1, 0)
        added = None
        if not causal and (left >= 0 or right >= 0):
            added = torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, -torch.inf)
        outputs.append(_sdpa(q, k, v, added, causal=causal, scale=scale)[0].transpose(0, 1))
    end = edges[0][-1]
    tail = query[end:].masked_fill(torch.ones((), dtype=torch.bool, device=query.device), 0.0)
    statistics = query.new_zeros((heads, query.shape[0]), dtype=compute_dtype(query))
    return torch.cat([*outputs, tail]), statistics


def edge_of(edges: tuple[int, int]) -> list[int]:
    """Return the bounds of a sequence taken by itself."""
    return [0, edges[1] - edges[0]]


def padded_varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[Any, ...], masks: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """Return `varlen_attention` without reading bounds on the host: pads every sequence to the greatest length."""
    bounds, bounds_k, longest, longest_keys = lengths
    scale, left, right, dropout_p, seed = masks
    heads, compute = query.shape[1], compute_dtype(query, key)
    q, rows, count = _padded(query, bounds, longest)
    k, _, count_k = _padded(_repeated(key, heads), bounds_k, longest_keys)
    v, _, _ = _padded(_repeated(value, heads), bounds_k, longest_keys)
    m = torch.arange(longest, dtype=torch.int64, device=query.device)[:, None]
    n = torch.arange(longest_keys, dtype=torch.int64, device=query.device)
    distance = n - m - (count_k - count)[:, None, None]  # [sequences, longest, longest_keys]
    seen = _in_window(distance, left, right) & (n < count_k[:, None, None]) & (m < count[:, None, None])
    logits = q.to(compute) @ k.to(compute).transpose(-1, -2) * scale
    logits = logits.masked_fill(~seen[:, None], -torch.inf)
    keep = None
    if seed is not None:  # all heads of all sequences are numbered one after the other
        keep = dropout_keep(seed, 0, q.shape[0] * heads, longest, longest_keys, dropout_p)
        keep = keep.unflatten(0, (q.shape[0], heads))
    output = _dropped(_softmax_or_zeros(logits), keep, dropout_p) @ v.to(compute)
    sums = logits.detach().logsumexp(-1) if longest_keys else logits.new_zeros(logits.shape[:3])
    flat, flat_sums = output.transpose(1, 2).flatten(0, 1), sums.transpose(1, 2).flatten(0, 1)
    positions = rows.reshape(-1)
    padded = flat.new_zeros(query.shape[0] + 1, *flat.shape[1:]).index_add(0, positions, flat)[:-1]
    all_sums = flat_sums.new_full((query.shape[0] + 1, heads), -torch.inf).index_copy(0, positions, flat_sums)[:-1]
    return padded.to(query.dtype), all_sums.transpose(0, 1)


def _padded(tensor: Tensor, bounds: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed rows as [sequences, H, longest, D], the row of each element, and the lengths of the sequences.

    Padding is read from and written to a row of zeros beyond the last row.
    """
    total = tensor.shape[0]
    rows = bounds[:-1, None] + torch.arange(longest, dtype=torch.int64, device=bounds.device)
    inside = (rows < bounds[1:, None]) & (rows >= 0) & (rows < total)
    rows = torch.where(inside, rows, total)
    whole = torch.cat((tensor, tensor.new_zeros((1, *tensor.shape[1:]))))
    return whole[rows].transpose(1, 2), rows, inside.sum(1)
