"""The attentions with PyTorch's own operator, used where there is no kernel. Differentiable by autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .. import _transfer
from .._device import SOFTMAX_SUMS_IN_HALF
from .._library import autocast_off
from . import reference


class Graph:
    """A computation that PyTorch can differentiate, kept by an autograd Function between its two halves."""

    def __init__(
        self, function: Callable[..., Tensor], inputs: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> None:
        with torch.enable_grad():
            twins = [None if t is None else t.detach() for t in inputs]
            self._leaves = [
                t.requires_grad_() if want and t is not None else None for t, want in zip(twins, wanted, strict=True)
            ]
            self._output = function(*twins)
        self.output = self._output.detach()

    def backward(self, dout: Tensor) -> list[Tensor | None]:
        """Gradients of the inputs, None where none is wanted."""
        leaves = [leaf for leaf in self._leaves if leaf is not None]
        found = iter(torch.autograd.grad(self._output, leaves, dout, retain_graph=True))
        return [None if leaf is None else next(found) for leaf in self._leaves]


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
    terms = None if mask is None else (mask.to(dtype) - 1) * inf
    wants_bias = added is not None and added.requires_grad and torch.is_grad_enabled()
    if added is not None and wants_bias and dtype.itemsize >= 4 and _transfer.on_host(query):
        # PyTorch's operator has nothing fused for a bias with a gradient, and takes longer than the formula.
        return _formula(query, key, value, added, terms)
    if terms is not None:
        added = terms if added is None else added + terms
    return _sdpa(query, key, value, added)


def _formula(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, terms: Tensor | None) -> Tensor:
    with autocast_off(query):
        logits = query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2)
        logits += bias
        if terms is not None:
            logits += terms
        return torch.softmax(logits, -1) @ value


def _sdpa(query: Tensor, key: Tensor, value: Tensor, added: Tensor | None = None) -> Tensor:
    """With one dimension of batches, which fused implementations want, and without autocast, which was applied."""
    lead = query.shape[:-3]
    if added is not None:
        added = added.reshape((1,) * (query.dim() - added.dim()) + tuple(added.shape))
        added = added.expand(*lead, *added.shape[-3:]).reshape(math.prod(lead), *added.shape[-3:])
    if len(lead) != 1:
        query, key, value = (t.reshape(math.prod(lead), *t.shape[-3:]) for t in (query, key, value))
    dtype = query.dtype
    if SOFTMAX_SUMS_IN_HALF and dtype.itemsize == 2 and _transfer.on_host(query):
        query, key, value = query.float(), key.float(), value.float()
        added = None if added is None else added.float()
    with autocast_off(query):
        output = scaled_dot_product_attention(query, key, value, added).to(dtype)
    return output if len(lead) == 1 else output.reshape(*lead, *output.shape[1:])


def packed_attention(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float, seed: Tensor | None) -> Tensor:
    """As `packed.packed_attention`, with the seed of its dropout."""
    if not _transfer.on_host(cu_seqlens) or torch.compiler.is_compiling():
        return padded_attention(qkv, cu_seqlens, max_seqlen, dropout_p, seed)
    if seed is not None:
        return reference.packed_attention(qkv, cu_seqlens, dropout_p, seed)
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    if bounds[0] == 0 and bounds[-1] == qkv.shape[0] and len(set(lengths)) == 1:
        batches = qkv.reshape(len(lengths), lengths[0], *qkv.shape[1:])
        return _sdpa(*batches.permute(2, 0, 3, 1, 4).unbind(0)).transpose(1, 2).flatten(0, 1)
    outputs = [
        _sdpa(*qkv[start:end].permute(1, 2, 0, 3).unsqueeze(1))[0].transpose(0, 1) for start, end in pairwise(bounds)
    ]
    return torch.cat([*outputs, reference.zero_rows(qkv, bounds[-1])])


class _Padding:
    """All sequences at their greatest length, so that no length has to be known on the host."""

    def __init__(self, cu_seqlens: Tensor, max_seqlen: int, total: int) -> None:
        starts, ends = cu_seqlens[:-1, None], cu_seqlens[1:, None]
        rows = starts + torch.arange(max_seqlen, dtype=torch.int64, device=cu_seqlens.device)
        # [sequences, max_seqlen]; rows that do not exist are not looked for, whatever the bounds are.
        self.inside = (rows < ends) & (rows >= 0) & (rows < total)
        self._total = total
        # Rows of padding come from and go to a row beyond the last.
        self._rows = torch.where(self.inside, rows, total)

    def mask(self) -> Tensor:
        """Of keys; what has no keys at all attends to everything, because nothing is looked at then."""
        return (self.inside | ~self.inside.any(1, keepdim=True))[:, None, None, :]

    def pad(self, packed: Tensor) -> Tensor:
        """[total, ..., H, D] as [..., sequences, H, max_seqlen, D], with zeros for what is padding."""
        whole = torch.cat((packed, torch.zeros_like(packed[:1])))
        return whole[self._rows].movedim((0, 1), (-4, -2))

    def unpad(self, padded: Tensor) -> Tensor:
        """The inverse of `pad`, with zeros for rows that belong to no sequence."""
        flat = padded.movedim((-4, -2), (0, 1)).flatten(0, 1)
        return flat.new_zeros(self._total + 1, *flat.shape[1:]).index_add(0, self._rows.reshape(-1), flat)[:-1]


def padded_attention(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float, seed: Tensor | None) -> Tensor:
    """As `packed_attention`, without looking at `cu_seqlens` on the host."""
    if not qkv.shape[0]:
        return reference.zero_rows(qkv, 0)
    padding = _Padding(cu_seqlens, max_seqlen, qkv.shape[0])
    query, key, value = padding.pad(qkv)
    mask = padding.mask()
    if seed is None:
        output = _sdpa(query, key, value, torch.where(mask, 0.0, float("-inf")).to(qkv.dtype))
    else:
        keep = _padded_keep(seed, query, dropout_p)
        output = reference.attention(query, key, value, mask, None, _EXCLUDED, keep, dropout_p)
    return padding.unpad(output)


def padded_backward(
    dout: Tensor, qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float, seed: Tensor | None
) -> Tensor:
    """The gradient of qkv, in operators that have derivatives themselves."""
    if not qkv.shape[0]:
        return torch.zeros_like(qkv)
    padding = _Padding(cu_seqlens, max_seqlen, qkv.shape[0])
    query, key, value = padding.pad(qkv)
    keep = None if seed is None else _padded_keep(seed, query, dropout_p)
    *gradients, _ = reference.backward(
        padding.pad(dout), query, key, value, padding.mask(), None, _EXCLUDED, keep, dropout_p
    )
    return padding.unpad(torch.stack(gradients))


# So large that nothing is left of probabilities, in float32 and in float64.
_EXCLUDED = 1e30


def _padded_keep(seed: Tensor, query: Tensor, dropout_p: float) -> Tensor:
    sequences, heads, rows, _ = query.shape
    # All heads of all sequences are numbered one after the other.
    return reference.dropout_keep(seed, 0, sequences * heads, rows, rows, dropout_p).unflatten(0, (sequences, heads))
