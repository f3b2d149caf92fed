"""Ring attention: ranks pass keys and values on while each rank computes with the keys it has.

In step i rank r has the keys of rank r - i. With a causal mask, all queries see the first chunk of an earlier rank's
keys, and none sees the second. Keys of a later rank are seen by the second chunk of queries only. So every step
computes half of the square.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._failures import explained
from ...ops._host import HOST, on_host
from ._blocks import Block, Merged
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


class Plan:
    """The blocks of one rank: for each step a block, and its rows of queries and of keys."""

    def __init__(
        self, bounds: Tensor, total: int, longest: int, scale: float, causal: bool, ranks: int, rank: int
    ) -> None:
        self.ranks, self.rank, self.causal = ranks, rank, causal
        own = bounds // ranks
        rows, length = total // ranks, longest // ranks
        self.local = Block(own, own, length, length, scale, -1, 0 if causal else -1)
        self.whole = Block(own, own, length, length, scale)
        if causal:
            half, shorter = own // 2, -(-length // 2)
            self.first_keys = Block(own, half, length, shorter, scale)
            self.second_queries = Block(half, own, shorter, length, scale)
            self.first = rows_of_chunks(own, rows, 2, 0, 1)
            self.second = rows_of_chunks(own, rows, 2, 1, 2)

    def step(self, number: int) -> tuple[Block, Tensor | None, Tensor | None]:
        """Return the block of a step, the rows of queries and the rows of keys; None for all of them."""
        if number == 0:
            return self.local, None, None
        if not self.causal:
            return self.whole, None, None
        if number <= self.rank:
            return self.first_keys, None, self.first
        return self.second_queries, self.second, None


def _taken(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor if rows is None else tensor.index_select(0, rows)


class RingAttention(torch.autograd.Function):
    """Attention over a ring of ranks; rows are packed, and `bounds` belong to the whole sequences."""

    @staticmethod
    def forward(ctx, query, key, value, bounds, total, longest, scale, causal, group):  # type: ignore[no-untyped-def, override]
        plan = Plan(bounds, total, longest, scale, causal, dist.get_world_size(group), dist.get_rank(group))
        travelling = torch.stack((key, value))
        merged: Any = None
        for number in range(plan.ranks):
            passing = Passing(travelling, group) if number + 1 < plan.ranks else None
            block, queries, keys = plan.step(number)
            parts = (_taken(query, queries), *(_taken(tensor, keys) for tensor in travelling))
            output, lse = block.forward(*parts)
            if merged is None:
                merged = Merged(output, lse)
            else:
                merged.add(output, lse, queries)
            if passing is not None:
                travelling = passing.wait()
        output, lse = merged.results()
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.plan, ctx.group = plan, group
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):  # type: ignore[no-untyped-def, override]
        query, key, value, output, lse = ctx.saved_tensors
        plan, group, wide = ctx.plan, ctx.group, lse.dtype
        dout, travelling = dout.contiguous(), torch.stack((key, value))
        dquery = torch.zeros_like(query, dtype=wide)
        passing_gradients: Any = None
        for number in range(plan.ranks):
            passing = Passing(travelling, group) if number + 1 < plan.ranks else None
            block, queries, keys = plan.step(number)
            parts = (_taken(query, queries), *(_taken(tensor, keys) for tensor in travelling))
            sums = lse if queries is None else lse.index_select(1, queries).contiguous()
            block_gradients = block.backward(_taken(dout, queries), parts, _taken(output, queries), sums)
            if queries is None:
                dquery += block_gradients[0]
            else:
                dquery.index_add_(0, queries, block_gradients[0].to(wide))
            # The gradients of keys travel with the keys: the ones for this step's keys arrive here now.
            if passing_gradients is None:
                dkeys = torch.zeros((2, *key.shape), dtype=wide, device=key.device)
            else:
                dkeys = passing_gradients.wait()
            for index in range(2):
                if keys is None:
                    dkeys[index] += block_gradients[1 + index]
                else:
                    dkeys[index].index_add_(0, keys, block_gradients[1 + index].to(wide))
            passing_gradients = Passing(dkeys, group)
            if passing is not None:
                travelling = passing.wait()
        dkey, dvalue = passing_gradients.wait()  # one more hop, back to the rank that holds these keys
        return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype), *(None,) * 6
