"""Differentiable exchanges of tokens between ranks that hold different experts, or parts of the same experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._distributed import collectives, exchange
from ...ops._host import HOST, on_host
from ._groups import size_of

_GATHER = 'the all-gather of experts\' tokens (moe_token_dispatcher_type="alltoall" takes other numbers on each rank)'
_SUM = "the reduce-scatter of experts' results"


class _Gather(torch.autograd.Function):
    """An all-gather along the first dimension; its backward pass is the reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return exchange.gather(tensor, group, _GATHER)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _SumOfPart.apply(gradient, ctx.group), None


class _SumOfPart(torch.autograd.Function):
    """A reduce-scatter along the first dimension; its backward pass is the all-gather."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return exchange.sum_of_part(tensor, group, _SUM)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _Gather.apply(gradient, ctx.group), None


class _AllToAll(torch.autograd.Function):
    """An exchange of rows: `sent[r]` rows go to rank r, and `received[r]` come from it. Gradients go back."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: Tensor, group: Any, received: list[int], sent: list[int]
    ) -> Tensor:
        ctx.settings = group, sent, received
        through_host = dist.get_backend(group) == dist.Backend.GLOO and not on_host(rows)
        outgoing = (rows.to(HOST) if through_host else rows).contiguous()
        shape = (sum(received), *rows.shape[1:])
        incoming = torch.empty(shape, dtype=rows.dtype, device=outgoing.device)
        description = f"the all-to-all of experts' tokens ({rows.dtype} {list(rows.shape)} here)"
        collectives.start(description, dist.all_to_all_single, incoming, outgoing, received, sent, group=group).wait()
        return incoming.to(rows.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _AllToAll.apply(gradient, *ctx.settings), None, None, None


def gather(tensor: Tensor, group: Any) -> Tensor:
    """Return the tensors of all ranks; the backward pass returns this rank's part of the gradient's sum."""
    return tensor if size_of(group) == 1 else _Gather.apply(tensor, group)


def sum_of_part(tensor: Tensor, group: Any) -> Tensor:
    """Return this rank's part of the sum over ranks; the backward pass gathers the gradients."""
    return tensor if size_of(group) == 1 else _SumOfPart.apply(tensor, group)


def all_to_all(rows: Tensor, group: Any, received: list[int], sent: list[int]) -> Tensor:
    """Send rows, ordered by their target rank, and return the rows that other ranks sent, ordered by source rank."""
    return rows if size_of(group) == 1 else _AllToAll.apply(rows, group, received, sent)


def gather_uneven(rows: Tensor, group: Any, sizes: Sequence[int]) -> Tensor:
    """Return the rows of all ranks, `sizes[r]` from rank r; messages are padded to the largest size."""
    longest = max(sizes)
    if size_of(group) == 1 or not longest:
        return rows
    parts = _Gather.apply(_padded(rows, longest), group).split(longest)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def sum_of_uneven_part(rows: Tensor, group: Any, sizes: Sequence[int], rank: int) -> Tensor:
    """Return this rank's `sizes[rank]` rows of the sum over ranks; the reverse of `gather_uneven`."""
    longest = max(sizes)
    if size_of(group) == 1 or not longest:
        return rows
    parts = [_padded(part, longest) for part in rows.split(list(sizes))]
    return _SumOfPart.apply(torch.cat(parts), group)[: sizes[rank]]


def _padded(rows: Tensor, length: int) -> Tensor:
    return torch.cat((rows, rows.new_zeros(length - rows.shape[0], *rows.shape[1:])))
