"""Attention in PyTorch operators: the definition that everything else is held against.

Runs on any device in any floating dtype; half precision is computed in float32, float64 in float64. Differentiable, so
that derivatives of derivatives come out of it too.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_LOW_32 = 0xFFFFFFFF


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any tensor is float64, else float32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    inf: float = 1e9,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """softmax(q k^T / sqrt(D) + bias + (mask - 1) * inf) v for [..., H, M or N, D], dropped where `keep` is False.

    `mask` and `bias` are broadcast to the logits [..., H, M, N].
    """
    probabilities = _probabilities(query, key, mask, bias, inf)
    return (_dropped(probabilities, keep, dropout_p) @ value.to(probabilities.dtype)).to(query.dtype)


def backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    inf: float = 1e9,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and bias, from the same arguments."""
    probabilities = _probabilities(query, key, mask, bias, inf)
    compute = probabilities.dtype
    gradient = dout.to(compute)
    dvalue = _dropped(probabilities, keep, dropout_p).transpose(-1, -2) @ gradient
    dprobabilities = _dropped(gradient @ value.to(compute).transpose(-1, -2), keep, dropout_p)
    inner = (probabilities * dprobabilities).sum(-1, keepdim=True)
    dlogits = probabilities * (dprobabilities - inner)
    scale = 1 / math.sqrt(query.shape[-1])
    dquery = dlogits @ key.to(compute) * scale
    dkey = dlogits.transpose(-1, -2) @ query.to(compute) * scale
    dbias = None if bias is None else _reduced(dlogits, bias)
    return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype), dbias


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


def _reduced(gradient: Tensor, tensor: Tensor) -> Tensor:
    """Summed over what `tensor` was broadcast along."""
    return gradient.sum_to_size(tensor.shape).to(tensor.dtype)


def packed_attention(qkv: Tensor, cu_seqlens: Tensor, dropout_p: float = 0.0, seed: Tensor | None = None) -> Tensor:
    """Attention within each sequence of `qkv` [total, 3, H, D]; zeros after the last one. Reads `cu_seqlens`."""
    bounds = cu_seqlens.tolist()
    outputs = []
    for index, (start, end) in enumerate(pairwise(bounds)):
        query, key, value = qkv[start:end].permute(1, 2, 0, 3)
        keep = None if seed is None else dropout_keep(seed, index, qkv.shape[2], end - start, end - start, dropout_p)
        outputs.append(attention(query, key, value, keep=keep, dropout_p=dropout_p).transpose(0, 1))
    return torch.cat([*outputs, zero_rows(qkv, bounds[-1])])


def zero_rows(qkv: Tensor, end: int) -> Tensor:
    """Outputs of the rows after the last sequence, with a gradient, which is zero too."""
    return qkv[end:, 0].masked_fill(torch.ones((), dtype=torch.bool, device=qkv.device), 0.0)


def dropout_keep(seed: Tensor, sequence: int, heads: int, rows: int, columns: int, dropout_p: float) -> Tensor:
    """Which probabilities of a sequence dropout keeps, [H, M, N]: the same for every implementation.

    A hash of seed, head, row and column instead of a generator's stream, which would depend on the order of the tiles.
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
    """Half of what 32 random bits must reach for an element to be kept: an even number."""
    return 2 * min(round(dropout_p * 2**30), 2**30 - 1)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit numbers, in int64, that leaves no pattern behind."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW_32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _LOW_32
    return x ^ (x >> 16)
