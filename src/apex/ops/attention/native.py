"""The attentions with PyTorch's own operator, used where there is no kernel. Differentiable by autograd."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .. import _transfer
from . import reference


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None, inf: float
) -> Tensor:
    """As `biased.attention`."""
    dtype = query.dtype
    if dtype == torch.float16 and mask is not None:
        # float16 has no `inf`: rows without keys would be NaN instead of the average that other dtypes give.
        wide = None if bias is None else bias.float()
        return attention(query.float(), key.float(), value.float(), mask, wide, inf).to(dtype)
    added = None if bias is None else bias.to(dtype)
    if mask is not None:
        terms = (mask.to(dtype) - 1) * inf
        added = terms if added is None else added + terms
    return _sdpa(query, key, value, added)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, added: Tensor | None = None) -> Tensor:
    """With one dimension of batches, which fused implementations want, and without autocast, which was applied."""
    lead = query.shape[:-3]
    if added is not None:
        added = added.expand(*lead, *added.shape[-3:]) if added.dim() >= 3 else added
        if added.dim() > 4:
            added = added.flatten(0, -4)
    if len(lead) != 1:
        query, key, value = (t.reshape(math.prod(lead), *t.shape[-3:]) for t in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        output = scaled_dot_product_attention(query, key, value, added)
    return output if len(lead) == 1 else output.reshape(*lead, *output.shape[1:])


def packed_attention(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float, seed: Tensor | None
) -> Tensor:
    """As `packed.packed_attention`, with the seed of its dropout."""
    if not _transfer.on_host(cu_seqlens) or torch.compiler.is_compiling():
        return _padded(qkv, cu_seqlens, max_seqlen, dropout_p, seed)
    if seed is not None:
        return reference.packed_attention(qkv, cu_seqlens, dropout_p, seed)
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
    if bounds[0] == 0 and bounds[-1] == qkv.shape[0] and len(set(lengths)) == 1:
        batches = qkv.unflatten(0, (len(lengths), lengths[0]))
        return _sdpa(*batches.permute(2, 0, 3, 1, 4)).transpose(1, 2).flatten(0, 1)
    outputs = [
        _sdpa(*qkv[start:end].permute(1, 2, 0, 3).unsqueeze(1))[0].transpose(0, 1)
        for start, end in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    return torch.cat([*outputs, qkv.new_zeros(qkv.shape[0] - bounds[-1], *qkv.shape[2:])])


def _padded(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float, seed: Tensor | None) -> Tensor:
    """All sequences at their greatest length, so that no length has to be known on the host."""
    total, _, heads, head_dim = qkv.shape
    starts, ends = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    rows = starts + torch.arange(max_seqlen, device=qkv.device)
    inside = rows < ends  # [sequences, max_seqlen]
    gathered = qkv[rows.clamp(max=max(0, total - 1))]  # [sequences, max_seqlen, 3, H, D]
    query, key, value = gathered.permute(2, 0, 3, 1, 4)
    if seed is None:
        # A sequence without rows attends to everything: PyTorch's operator may return NaN where nothing is allowed.
        allowed = (inside | (starts == ends))[:, None, None, :]
        output = _sdpa(query, key, value, torch.where(allowed, 0.0, float("-inf")).to(qkv.dtype))
    else:
        sequences = range(cu_seqlens.shape[0] - 1)
        keep = [reference.dropout_keep(seed, z, heads, max_seqlen, max_seqlen, dropout_p) for z in sequences]
        output = reference.attention(
            query, key, value, inside[:, None, None, :], None, 1e30, torch.stack(keep), dropout_p
        )
    flat = output.transpose(1, 2).reshape(-1, heads, head_dim)
    # Rows of padding go to a row beyond the last, which is dropped.
    where = torch.where(inside, rows, total).reshape(-1)
    return qkv.new_zeros(total + 1, heads, head_dim).index_add(0, where, flat)[:total]
