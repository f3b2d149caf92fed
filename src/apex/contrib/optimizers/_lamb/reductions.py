"""From gradients, which stay with their parameters, to means over all processes, bucket by bucket.

A round copies every gradient once to its place in a flat buffer and sends every bucket of it once. With `overlap` the
first round notes how often each gradient is added to, and the order in which buckets become complete; from the second
on they are sent in this order, that of process 0 everywhere, while the backward pass goes on. What has no gradient when
a round ends counts as zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...._failures import explained
from ....ops._transfer import on_host
from ....ops.multi_tensor import l2norm, rules, scale, zero
from ....ops.multi_tensor.flat import flat
from ....parallel._reduction import on_stream
from .._zero.arena import Arena, laid_out_like
from .._zero.collectives import Done, Work, all_reduce, begun, reduce_scatter
from .communicators import Communicators
from .lists import FixedLists

# What is said where other processes do not answer.
_ADDING = "adding up a bucket of gradients"


class _Target(NamedTuple):
    """Where a parameter's gradient, or these of its elements, go."""

    param: int
    place: Tensor
    elements: slice | None


class Reductions:
    """The gradients of `arenas`.

    With `full` every process gets the whole mean, else its shards, which then are averaged over machines. `norm` is
    float32 [1], that of the mean.
    """

    def __init__(self, arenas: Sequence[Arena], communicators: Communicators, *, full: bool, overlap: bool) -> None:
        self.arenas = list(arenas)
        self.norm: Tensor | None = None
        # Whether `complete` has been called since the last gradient arrived.
        self.is_complete = False
        self._communicators = communicators
        self._groups = communicators.groups
        # Whether the mean stays where the gradients were, in the buffer of all.
        self._in_place = full or self._groups.ranks == 1
        self._full = full
        self._overlap = overlap and not self._groups.is_one
        self._buckets = [(arena, number) for arena in self.arenas for number in range(len(arena.layout.bucket_sizes))]
        self._needs = [{piece.param for piece in arena.layout.pieces[bucket]} for arena, bucket in self._buckets]
        # Numbers of buckets in the order in which they are sent; None until it is known.
        self._order: list[int] | None = None
        # How often a gradient is added to in a round, if more than once.
        self._expected: Counter[int] = Counter()
        # For two collectives of which the second needs the first, so that nothing else waits.
        self._stream = None if on_host(self.arenas[0].params[0]) else torch.Stream(self.arenas[0].device)
        self._works: list[Work] = []
        self._measured: list[FixedLists] | None = None
        # By arena, the places of whole gradients.
        self._wholes: list[list[Tensor]] | None = None
        for arena in self.arenas:
            arena.gradient_buffer = arena.allocate(arena.layout.size, dtype=arena.dtypes.gradients, device=arena.device)
            if not self._in_place:
                arena.gradient_shard = arena.new_shard(arena.dtypes.gradients)
        # Of every parameter its arena, its number there, and the numbers of its buckets.
        numbers = {(id(arena), bucket): number for number, (arena, bucket) in enumerate(self._buckets)}
        self._places = {
            id(param): (arena, index, [numbers[id(arena), bucket] for bucket in arena.layout.buckets_of[index]])
            for arena in self.arenas
            for index, param in enumerate(arena.params)
        }
        self._targets = [self._targets_of(arena, bucket) for arena, bucket in self._buckets]
        self._start_round()

    def _targets_of(self, arena: Arena, number: int) -> list[_Target]:
        """Where gradients go in a bucket: views that are made once, which takes longer than copying."""
        bucket = arena.bucket(self._buffer(arena), number)
        return [
            _Target(piece.param, arena.view(self._buffer(arena), piece.param), None)
            if piece.size == arena.layout.sizes[piece.param]
            else _Target(piece.param, bucket[piece.offset : piece.offset + piece.size], slice(piece.start, piece.stop))
            for piece in arena.layout.pieces[number]
        ]

    def _start_round(self) -> None:
        # How many buckets have been sent, and which.
        self._sent = 0
        self._gone: set[int] = set()
        # Whether gradients have been cleared, so that the next ones belong to another round.
        self._sealed = False
        # How often gradients have been added to; and, of each bucket, which parameters it waits for.
        self._arrivals: Counter[int] = Counter()
        self._waiting = [set(needs) for needs in self._needs]
        # Buckets that wait for none, in the order in which their last gradient came.
        self._finished: dict[int, None] = {}
        for arena in self.arenas:
            arena.gradients = [None] * len(arena.params)

    # A backward pass --------------------------------------------------------------------------------------------------

    def arrived(self, param: Tensor, may_send: bool = True) -> None:
        """A backward pass has added to a parameter's gradient for the last time in this round."""
        place = self._places.get(id(param))
        if place is None:
            return
        if self._sealed:
            self._finish()
            self._start_round()
        arena, index, numbers = place
        assert param.grad is not None
        if param.grad.layout != torch.strided:
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(param.shape)} is sparse; only dense ones are divided "
                "among processes: use sparse=False in embeddings"
            )
        if not self._gone.isdisjoint(numbers):
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(param.shape)} changed after it had been sent to other "
                "processes: it is added to more often than in the first step. Call set_is_accumulation_step(True) "
                "before all backward passes of a step but the last, or use overlap_reductions=False"
            )
        arena.gradients[index] = laid_out_like(param.grad, param)
        self._arrivals[id(param)] += 1
        if self._arrivals[id(param)] >= self._expected.get(id(param), 1):
            for number in numbers:
                self._waiting[number].discard(index)
                if not self._waiting[number]:
                    self._finished.pop(number, None)
                    self._finished[number] = None
        if self._overlap and self._order is not None and may_send:
            while self._sent < len(self._order) and not self._waiting[self._order[self._sent]]:
                self._send_next()

    def hold(self, keep_tensors: bool) -> None:
        """Gradients are about to be cleared: what has arrived is kept, and sent if others may wait for it.

        `keep_tensors` says that the tensors will be written to.
        """
        if not self._arrivals:
            return
        if self._overlap and self._order is not None:
            while self._sent < len(self._order):
                self._send_next()
        elif keep_tensors:
            for arena in self.arenas:
                arena.gradients = [None if g is None else g.clone() for g in arena.gradients]
        self._sealed = True

    # The end of a round -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def complete(self) -> None:
        """Sends what has not been sent, waits, and measures the norm of the mean."""
        if not self._sealed:
            self._take_the_rest()
        if self._order is None and self._overlap:
            self._agree_on_order()
        while self._sent < len(self._buckets):
            self._send_next()
        self._finish()
        self._start_round()
        self.norm = self._norm_of_mean()
        self.is_complete = True

    @torch.no_grad()
    def complete_clipped(self, limit: Tensor | float | None, *, fused_norm: bool, fused_scale: bool) -> None:
        """The same for gradients that are shortened to `limit` in every process first; `norm` is that of before."""
        if not self._sealed:
            self._take_the_rest()
        self.norm = self._copy_measuring(fused_norm)
        factor = None
        if limit is not None:
            # What is not finite stays so on its way to the other processes.
            factor = torch.where(torch.isfinite(self.norm), torch.clamp(limit / self.norm, max=1.0), 1.0)
            if not fused_scale or not self._can_scale_while_reducing():
                buffers = [self._buffer(arena) for arena in self.arenas]
                scale(buffers, buffers, factor)
                factor = None
        while self._sent < len(self._buckets):
            self._send_next(factor, filled=True)
        self._finish()
        self._start_round()
        self.is_complete = True

    def _take_the_rest(self) -> None:
        """Takes gradients that no backward pass of this round has added to: what is there is what is meant."""
        for arena in self.arenas:
            for index, param in enumerate(arena.params):
                if arena.gradients[index] is None and param.grad is not None:
                    arena.gradients[index] = laid_out_like(param.grad, param)

    def _agree_on_order(self) -> None:
        """The order in which buckets were complete in process 0, then the others; from the last if none was."""
        rest = [number for number in reversed(range(len(self._buckets))) if number not in self._finished]
        order = torch.tensor([*self._finished, *rest], dtype=torch.int64, device=self.arenas[0].device)
        with explained("agreeing on the order of gradients with the first process"):
            dist.broadcast(order, self._groups.root)
        self._order = order.tolist()
        self._expected = self._arrivals

    def _copy_measuring(self, fused: bool) -> Tensor:
        """Copies all gradients to their places; the norm of all, in the same pass if `fused`."""
        if self._wholes is None:
            self._wholes = [
                [arena.view(self._buffer(arena), index) for index in range(len(arena.params))] for arena in self.arenas
            ]
        sources: list[Tensor] = []
        places: list[Tensor] = []
        missing: list[Tensor] = []
        for arena, wholes in zip(self.arenas, self._wholes, strict=True):
            for gradient, place in zip(arena.gradients, wholes, strict=True):
                if gradient is None:
                    missing.append(place)
                else:
                    sources.append(gradient)
                    places.append(place)
        if missing:
            zero(missing)
        if fused and sources:
            return l2norm(sources, outputs=places, of_inputs=True)[0]
        if sources:
            torch._foreach_copy_(places, sources)
        return l2norm([self._buffer(arena) for arena in self.arenas])[0]

    # Buckets ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _send_next(self, factor: Tensor | None = None, filled: bool = False) -> None:
        order = self._order
        number = len(self._buckets) - 1 - self._sent if order is None else order[self._sent]
        self._sent += 1
        self._gone.add(number)
        arena, index = self._buckets[number]
        if not filled:
            self._fill(arena, number)
        bucket = arena.bucket(self._buffer(arena), index)
        shard = bucket if self._in_place else arena.shard(self._shard(arena), index)
        self._works.append(self._reduce(bucket, shard, number, factor))

    def _fill(self, arena: Arena, number: int) -> None:
        """Copies gradients to their places in a bucket."""
        sources, places, missing = [], [], []
        for target in self._targets[number]:
            gradient = arena.gradients[target.param]
            if gradient is None:
                missing.append(target.place)
            else:
                sources.append(gradient if target.elements is None else flat(gradient)[target.elements])
                places.append(target.place)
        if sources:
            torch._foreach_copy_(places, sources)
        if missing:
            torch._foreach_zero_(missing)

    def _reduce(self, bucket: Tensor, shard: Tensor, number: int, factor: Tensor | None) -> Work:
        """Starts the mean of a bucket over all processes, times `factor`."""
        groups = self._groups
        if groups.is_one:
            return Done()
        reduce = self._communicators.reduce[number % len(self._communicators.reduce)]
        if self._in_place:
            return _averaged(bucket, reduce, factor)
        scatter = self._communicators.scatter[number % len(self._communicators.scatter)]
        if groups.replicas == 1:
            return _scattered(bucket, shard, scatter, factor)
        with on_stream(self._stream):
            first = _scattered(bucket, shard, scatter, factor)
            if on_host(bucket):
                return _Then(first, shard, reduce)
            first.wait()
            return all_reduce(shard, reduce, _ADDING, True)

    def _finish(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []

    def _can_scale_while_reducing(self) -> bool:
        """NCCL multiplies numbers as it adds them up."""
        return not self._groups.is_one and hasattr(dist, "_make_nccl_premul_sum") and dist.get_backend() == "nccl"

    # What the optimizer reads -----------------------------------------------------------------------------------------

    def local(self, arena: Arena) -> list[Tensor]:
        """The mean's elements of `arena.owned`."""
        shards = [
            arena.shard_of_bucket(arena.bucket(self._buffer(arena), number))
            if self._in_place
            else arena.shard(self._shard(arena), number)
            for number in range(len(arena.layout.bucket_sizes))
        ]
        return [shards[piece.bucket][piece.offset : piece.offset + piece.size] for piece in arena.owned]

    def _norm_of_mean(self) -> Tensor:
        """From the shards of the processes that divide the state."""
        if self._measured is None:
            local = [self.local(arena) for arena in self.arenas]
            self._measured = [FixedLists((None, pieces)) for pieces in local if pieces]
        totals = [lists.here().measured_total(rules.SQUARE_SUM, {}) for lists in self._measured]
        device = self.arenas[0].device
        total = torch.stack(totals).sum(0) if totals else torch.zeros(1, dtype=torch.float32, device=device)
        if self._groups.ranks > 1:
            all_reduce(total, self._groups.distributed, "measuring the norm of all gradients").wait()
        return total.sqrt_()

    def _buffer(self, arena: Arena) -> Tensor:
        assert arena.gradient_buffer is not None
        return arena.gradient_buffer

    def _shard(self, arena: Arena) -> Tensor:
        assert arena.gradient_shard is not None
        return arena.gradient_shard


def _scattered(bucket: Tensor, shard: Tensor, group: Any, factor: Tensor | None) -> Work:
    if factor is None:
        return reduce_scatter(shard, bucket, group, True, _ADDING)
    operation = _premultiplied(factor, shard.dtype, group)
    parts = list(bucket.view(dist.get_world_size(group), -1).unbind())
    return begun(_ADDING, dist.reduce_scatter, shard, parts, op=operation, group=group)


def _averaged(bucket: Tensor, group: Any, factor: Tensor | None) -> Work:
    if factor is None:
        return all_reduce(bucket, group, _ADDING, True)
    operation = _premultiplied(factor, bucket.dtype, group)
    return begun(_ADDING, dist.all_reduce, bucket, op=operation, group=group)


def _premultiplied(factor: Tensor, dtype: torch.dtype, group: Any) -> Any:
    """The operation of a mean times `factor`."""
    return dist._make_nccl_premul_sum((factor / dist.get_world_size(group)).to(dtype))  # type: ignore[attr-defined]


class _Then:
    """A mean over machines after a reduce-scatter, for the host, where nothing runs by itself."""

    def __init__(self, first: Work, shard: Tensor, group: Any) -> None:
        self._first, self._shard, self._group = first, shard, group

    def wait(self) -> None:
        self._first.wait()
        all_reduce(self._shard, self._group, _ADDING, True).wait()

    def is_completed(self) -> bool:
        return False
