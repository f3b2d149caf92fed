"""Ring attention: ranks pass keys and values on while each rank computes with the keys it has.

In step i rank r has the keys of rank r - i. With a causal mask, all queries see the first chunk of an earlier rank's
keys, and none sees the second. Keys of a later rank are seen by the second chunk of queries only. So every step
computes half of the square.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._distributed import exchange
from ..._failures import explained
from ...ops._host import HOST, on_host
from ...ops.attention.op_blocks import Block
from ._blocks import Merged
from ._rows import rows_of_chunks


class Passing:
    """An exchange in progress: a tensor is sent to the next rank, and one is received from the previous rank."""

    def __init__(self, tensor: Tensor, group: Any) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.to, self.source = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
        self.device, self.shape, self.dtype = tensor.device, tensor.shape, tensor.dtype
        through_host = dist.get_backend(group) == dist.Backend.GLOO and not on_host(tensor)
        # Kept until the message has been sent.
        self.sent = (tensor.to(HOST) if through_host else tensor).contiguous()
        self.arrival = torch.empty_like(self.sent)
        # Sent as bytes, because Gloo has no bfloat16.
        operations = [
            dist.P2POp(dist.isend, self.sent.view(-1).view(torch.uint8), self.to, group),
            dist.P2POp(dist.irecv, self.arrival.view(-1).view(torch.uint8), self.source, group),
        ]
        with explained(self._what()):
            self.work = dist.batch_isend_irecv(operations)

    def _what(self) -> str:
        return f"ring attention's exchange with ranks {self.source} and {self.to}"

    def wait(self) -> Tensor:
        """Wait for the exchange, and return the previous rank's tensor."""
        with explained(self._what()):
            for work in self.work:
                work.wait()
        return self.arrival.to(self.device)


# Rows that take part in a step: all of them, a range, or those with the given indices.
Rows = Tensor | slice | None


class Plan:
    """The blocks of one rank: for each step the block, and its rows of queries and of keys.

    `sequences` is the number of sequences if all have the length `longest`, otherwise 0.
    """

    def __init__(
        self,
        bounds: Tensor,
        total: int,
        longest: int,
        scale: float,
        causal: bool,
        ranks: int,
        rank: int,
        sequences: int = 0,
    ) -> None:
        self.ranks, self.rank, self.causal = ranks, rank, causal
        own = bounds // ranks
        rows, length = total // ranks, longest // ranks
        self.local = Block(own, own, length, length, scale, -1, 0 if causal else -1, sequences)
        self.whole = Block(own, own, length, length, scale, sequences=sequences)
        self.places: Tensor | None = None
        if causal:
            half, shorter = own // 2, -(-length // 2)
            self.first_keys = Block(own, half, length, shorter, scale, sequences=sequences)
            self.second_queries = Block(half, own, shorter, length, scale, sequences=sequences)
            self.first: Rows = rows_of_chunks(own, rows, 2, 0, 1)
            self.second: Rows = rows_of_chunks(own, rows, 2, 1, 2)
            count = torch.arange(rows // 2, dtype=torch.int64, device=bounds.device)
            self.places = torch.full((rows,), -1, dtype=torch.int64, device=bounds.device)
            self.places.index_copy_(0, self.second, count)
            if sequences == 1:  # slices give views, index tensors would copy
                self.first, self.second = slice(0, rows // 2), slice(rows // 2, rows)

    def step(self, number: int) -> tuple[Block, Rows, Rows]:
        """Return the block of step `number` of the ring, and its rows of queries and of keys; None means all rows."""
        if number == 0:
            return self.local, None, None
        if not self.causal:
            return self.whole, None, None
        if number <= self.rank:
            return self.first_keys, None, self.first
        return self.second_queries, self.second, None

    def attend(self, number: int, query: Tensor, keys: Sequence[Tensor], merged: Merged) -> None:
        """Add the block of a step to `merged`; `keys` are key and value."""
        block, of_queries, of_keys = self.step(number)
        output, lse = block.forward(_taken(query, of_queries), *(_taken(each, of_keys) for each in keys))
        merged.add(output, lse, of_queries is not None)

    def differentiate(
        self,
        number: int,
        dout: Tensor,
        query: Tensor,
        keys: Sequence[Tensor],
        whole: tuple[Tensor, Tensor],
        dquery: Any,
    ) -> tuple[Sequence[Tensor], Rows]:
        """Return a step's gradients of key and value, and their rows; add the gradient of the query to `dquery`.

        `whole` is output and logs of sums of the whole attention.
        """
        block, of_queries, of_keys = self.step(number)
        parts = (_taken(query, of_queries), *(_taken(each, of_keys) for each in keys))
        output, lse = _taken(whole[0], of_queries), _taken(whole[1], of_queries, 1).contiguous()
        dpart, *dkeys = block.backward(_taken(dout, of_queries), parts, output, lse)
        dquery.add(dpart, None, of_queries is not None)
        return dkeys, of_keys


def _taken(tensor: Tensor, rows: Rows, dim: int = 0) -> Tensor:
    if rows is None:
        return tensor
    if isinstance(rows, slice):
        return tensor.narrow(dim, rows.start, rows.stop - rows.start)
    return tensor.index_select(dim, rows)


def add_rows(total: Tensor, rows: Rows, part: Tensor) -> None:
    """Add `part` to some rows of `total`, which may have a wider dtype."""
    if isinstance(rows, Tensor):
        total.index_add_(0, rows, part.to(total.dtype))
    else:
        _taken(total, rows).add_(part)


class RingAttention(torch.autograd.Function):
    """Attention over a ring of ranks; rows are packed, and `bounds` belong to the whole sequences."""

    @staticmethod
    def forward(ctx, query, key, value, bounds, total, longest, sequences, scale, causal, group):  # type: ignore[no-untyped-def, override]
        place = (dist.get_world_size(group), dist.get_rank(group))
        plan = Plan(bounds, total, longest, scale, causal, *place, sequences)
        travelling = torch.stack((key, value))
        exchange.check_alike(travelling, group, "ring attention's keys and values")
        merged = Merged(plan.places)
        for number in range(plan.ranks):
            passing = Passing(travelling, group) if number + 1 < plan.ranks else None
            plan.attend(number, query, travelling, merged)  # type: ignore[arg-type]
            if passing is not None:
                travelling = passing.wait()
        output, lse = merged.results(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.plan, ctx.group = plan, group
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):  # type: ignore[no-untyped-def, override]
        query, key, value, output, lse = ctx.saved_tensors
        plan, group = ctx.plan, ctx.group
        dout, travelling = dout.contiguous(), torch.stack((key, value))
        dquery = Merged(plan.places)
        passing_gradients: Any = None
        for number in range(plan.ranks):
            passing = Passing(travelling, group) if number + 1 < plan.ranks else None
            found, rows = plan.differentiate(number, dout, query, travelling, (output, lse), dquery)  # type: ignore[arg-type]
            # The gradients of keys travel with the keys: the ones for this step's keys arrive here now.
            if passing_gradients is None:
                dkeys = torch.stack(tuple(found)).to(lse.dtype)
            else:
                dkeys = passing_gradients.wait()
                for total, part in zip(dkeys, found, strict=True):
                    add_rows(total, rows, part)
            passing_gradients = Passing(dkeys, group)
            if passing is not None:
                travelling = passing.wait()
        dkey, dvalue = passing_gradients.wait()  # one hop more, back to the rank whose keys they are
        return dquery.results(query.dtype)[0], dkey.to(key.dtype), dvalue.to(value.dtype), *(None,) * 7
