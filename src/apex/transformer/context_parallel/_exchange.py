"""Attention after an exchange: of heads for sequences (all-to-all), or of all keys (all-gather)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._distributed import collectives, exchange
from ...ops._host import HOST, on_host
from ...ops.attention import varlen_attention
from ._rows import rows_of_all_ranks, rows_of_chunks


def _all_to_all(tensor: Tensor, group: Any) -> Tensor:
    """Send part r of the first dimension to rank r; return the received parts in the order of ranks."""
    exchange.check_alike(tensor, group, "the all-to-all of context-parallel heads")
    through_host = dist.get_backend(group) == dist.Backend.GLOO and not on_host(tensor)
    sent = (tensor.to(HOST) if through_host else tensor).contiguous()
    received = torch.empty_like(sent)
    flat = (received.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8))
    collectives.start("the all-to-all of context-parallel heads", dist.all_to_all_single, *flat, group=group).wait()
    return received.to(tensor.device)


class _AllToAll(torch.autograd.Function):
    """An all-to-all of equal parts of the first dimension; its backward pass is an all-to-all, too."""

    @staticmethod
    def forward(ctx, tensor, group):  # type: ignore[no-untyped-def, override]
        ctx.group = group
        return _all_to_all(tensor, group)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def, override]
        return _AllToAll.apply(gradient, ctx.group), None


class _Gather(torch.autograd.Function):
    """An all-gather along the first dimension; its backward pass is the reduce-scatter."""

    @staticmethod
    def forward(ctx, tensor, group):  # type: ignore[no-untyped-def, override]
        ctx.group = group
        return exchange.gather(tensor, group, "the all-gather of context-parallel keys")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def, override]
        return exchange.sum_of_part(gradient, ctx.group, "the reduce-scatter of context-parallel keys"), None


def all_to_all_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: tuple[Tensor, int, int],
    masks: dict[str, Any],
    group: Any,
) -> Tensor:
    """Return attention after an exchange that gives each rank some of the heads of whole sequences.

    `layout` is bounds, rows and greatest length of the whole sequences. Keys with fewer heads than ranks are repeated.
    """
    ranks, (bounds, total, longest) = dist.get_world_size(group), layout
    heads, key_heads = query.shape[1], key.shape[1]
    if heads % ranks:
        raise ValueError(f'comm="a2a" gives each of {ranks} ranks as many heads: {heads} cannot be divided')
    repeats = ranks // math.gcd(key_heads, ranks)
    if heads % (key_heads * repeats):
        raise ValueError(
            f'comm="a2a" gives each of {ranks} ranks as many heads: {key_heads} heads of keys, each repeated '
            f"{repeats} times, cannot be shared by {heads} heads of queries"
        )
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    order = rows_of_all_ranks(bounds, total, ranks)
    natural = torch.argsort(order)

    def whole(tensor: Tensor) -> Tensor:
        parts = tensor.unflatten(1, (ranks, -1)).transpose(0, 1)  # [ranks, rows, heads of one, D]
        return _AllToAll.apply(parts, group).flatten(0, 1).index_select(0, natural)

    output = varlen_attention(whole(query), whole(key), whole(value), bounds, longest, **masks)
    parts = output.index_select(0, order).unflatten(0, (ranks, -1))  # type: ignore[union-attr]
    return _AllToAll.apply(parts, group).transpose(0, 1).flatten(1, 2)


def all_gather_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: tuple[Tensor, int, int],
    masks: dict[str, Any],
    group: Any,
) -> Tensor:
    """Return attention of this rank's queries with the keys of all ranks; `layout` as for `all_to_all_attention`."""
    ranks, rank, (bounds, total, longest) = dist.get_world_size(group), dist.get_rank(group), layout
    natural = torch.argsort(rows_of_all_ranks(bounds, total, ranks))
    key, value = (_Gather.apply(tensor, group).index_select(0, natural) for tensor in (key, value))
    own, rows = bounds // ranks, total // ranks
    if not masks["causal"]:
        lengths = (own, -(-longest // ranks), bounds, longest)
        return varlen_attention(query, key, value, *lengths, **masks)  # type: ignore[return-value]
    output = torch.empty_like(query)
    half, shorter = bounds // (2 * ranks), -(-longest // (2 * ranks))
    for index, chunk in enumerate((rank, 2 * ranks - 1 - rank)):
        mine = rows_of_chunks(own, rows, 2, index, index + 1)
        # Keys up to the end of the chunk: the last query then has the position of the last key.
        seen = rows_of_chunks(bounds, total, 2 * ranks, 0, chunk + 1)
        lengths = (half, shorter, half * (chunk + 1), shorter * (chunk + 1))
        parts = (query.index_select(0, mine), key.index_select(0, seen), value.index_select(0, seen))
        output = output.index_copy(0, mine, varlen_attention(*parts, *lengths, **masks))  # type: ignore[arg-type]
    return output
