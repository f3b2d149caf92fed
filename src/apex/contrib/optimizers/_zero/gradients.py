"""From gradients of parameters to sums over all processes, bucket by bucket, while backward passes go on.

A round sends every bucket of every arena once, in the same order in all processes, whatever their backward passes
produced: the order of the layout at first, then that in which the first round's buckets became complete. A bucket goes
out when the gradients of all its parameters, and all buckets before it, are there; at the end of the backward pass the
others follow, with zeros for what is missing. So a pass is a round. Nothing waits for other processes before its end:
they may have got less far, and wait for this one in a collective of their own. Sums of several rounds add up. Gradients
that are added to before they are sent add up in the dtype that they travel in.

With one process nothing is sent and nothing copied: the gradients themselves are what `local` returns.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...._failures import explained
from ....ops._transfer import on_host
from ....ops.multi_tensor.flat import flat
from ....parallel._reduction import on_stream
from .arena import Arena, laid_out_like
from .collectives import Done, Work, all_reduce, reduce_scatter
from .groups import Groups
from .layout import Piece

# What is said where other processes do not answer.
_ADDING = "adding up a bucket of gradients"

_dtype = operator.attrgetter("dtype")
_grad_of = operator.attrgetter("grad")


@dataclass
class _Sent:
    """A bucket under way."""

    arena: Arena
    number: int
    bucket: Tensor
    shard: Tensor
    work: Work
    # Whether `shard` is to be added to the sums of earlier rounds.
    adds: bool


class _Unit(Protocol):
    """A stretch of a flat shard; of one process, a parameter."""

    @property
    def param(self) -> int: ...
    @property
    def flat(self) -> int: ...
    @property
    def size(self) -> int: ...


class GradientSync:
    """The gradients of some arenas.

    A bucket that is under way takes its whole size in memory, unless `contiguous`: then gradients are views of a buffer
    that stays. When a round is ended `in_flight` buckets at most are under way at a time.
    """

    def __init__(self, groups: Groups, *, average: bool = True, in_flight: int = 2, contiguous: bool = False) -> None:
        self.groups = groups
        self.average = average
        self.in_flight = in_flight
        self.contiguous = contiguous
        self.arenas: list[Arena] = []
        # Whether a round has been completed since gradients were cleared, and nothing arrived after it.
        self.is_complete = False
        # Grows whenever gradients change.
        self.version = 0
        # How many rounds have ended.
        self.rounds = 0
        # All buckets in the order in which they are sent, and the number of the next one.
        self._order: list[tuple[int, int]] = []
        self._next = 0
        self._missing: list[int] = []
        self._seen: list[set[int]] = []
        self._number: dict[tuple[int, int], int] = {}
        # Buckets in the order in which they became complete, until all processes have agreed on one.
        self._completed: list[int] | None = []
        self._under_way: deque[_Sent] = deque()
        # Buckets that have been sent, and gradients that are sums made here: these may be added to in place.
        self._filled: set[int] = set()
        self._own: set[tuple[int, int]] = set()
        self._zeros: Tensor | None = None
        self._stream: Any = None

    # Arenas and buffers -----------------------------------------------------------------------------------------------

    def add(self, arena: Arena) -> None:
        """Takes care of one more arena; between two rounds, in all processes."""
        self.finish()
        place = len(self.arenas)
        self.arenas.append(arena)
        self._seen.append(set())
        for bucket in range(len(arena.layout.bucket_sizes)):
            self._number[place, bucket] = len(self._order)
            self._order.append((place, bucket))
        self._completed = []
        self._start_round()
        if self.contiguous:
            self.make_buffer(arena)

    def make_buffer(self, arena: Arena) -> None:
        """Gives an arena its whole buffer, which gradients then are views of."""
        if arena.gradient_buffer is None:
            buffer = arena.allocate(arena.layout.size, dtype=arena.dtypes.gradients, device=arena.device)
            arena.gradient_buffer = buffer
            arena.gradient_views = [arena.view(buffer, index) for index in range(len(arena.params))]

    def clear(self) -> None:
        """Forgets all gradients."""
        self.finish()
        for arena in self.arenas:
            arena.gradients = [None] * len(arena.params)
            if arena.gradient_buffer is not None:
                arena.gradient_buffer.zero_()
        self._filled.clear()
        self._own.clear()
        self.is_complete = False
        self.version += 1
        self._start_round()

    # Gradients arrive -------------------------------------------------------------------------------------------------

    # Without no_grad, which takes longer than all of it: nothing here requires gradients.
    def take(self, place: int, index: int) -> None:
        """Takes the gradient away from a parameter of arena number `place`; it has none afterwards."""
        arena = self.arenas[place]
        param = arena.params[index]
        gradient = param.grad
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(param.shape)} is sparse; only dense ones are divided "
                "among processes: use sparse=False in embeddings"
            )
        if not arena.layout.sizes[index]:
            param.grad = None  # nothing that another round would be for
            return
        numbers = () if self.groups.is_one else [self._number[place, n] for n in arena.layout.buckets_of[index]]
        if self._next and any(number < self._next for number in numbers):
            self._send_rest()  # a part of it, or all, is gone: this belongs to the next round
        param.grad = None
        self.is_complete = False
        self.version += 1
        gradient = laid_out_like(gradient.detach() if gradient.requires_grad else gradient, param)
        if arena.gradient_buffer is not None:
            while any(sent.number in numbers for sent in self._under_way):
                self._finish_first()
            view = arena.gradient_views[index]
            if view.data_ptr() != gradient.data_ptr():
                view.add_(gradient)
            arena.gradients[index] = view
            return
        before = arena.gradients[index]
        if before is None:
            arena.gradients[index] = gradient
        elif (place, index) in self._own:
            before.add_(gradient)
        else:
            arena.gradients[index] = before.to(arena.dtypes.gradients, copy=True).add_(gradient)
            self._own.add((place, index))

    def take_all(self) -> None:
        """Takes every gradient that there is."""
        for place, arena in enumerate(self.arenas):
            for index, gradient in enumerate(map(_grad_of, arena.params)):
                if gradient is not None:
                    self.take(place, index)

    def arrived(self, place: int, index: int) -> None:
        """Takes the gradient that a backward pass has finished with; sends what is complete."""
        self.take(place, index)
        buckets = self.arenas[place].layout.buckets_of[index]
        if self.groups.is_one or not buckets or index in self._seen[place]:
            return
        self._seen[place].add(index)
        for bucket in buckets:
            number = self._number[place, bucket]
            self._missing[number] -= 1
            if self._completed is not None and not self._missing[number]:
                self._completed.append(number)
        while self._next < len(self._order) and not self._missing[self._next]:
            self._send()
        if self._next == len(self._order):
            self.end_round()

    @property
    def has_begun(self) -> bool:
        """Whether gradients of the present round have arrived."""
        return any(self._seen)

    # Rounds -----------------------------------------------------------------------------------------------------------

    def _start_round(self) -> None:
        self._next = 0
        for seen in self._seen:
            seen.clear()
        self._missing = [len(self.arenas[place].layout.pieces[bucket]) for place, bucket in self._order]

    def end_round(self) -> None:
        """Takes every gradient that there is, and sends what has not been sent; all processes must."""
        self.take_all()
        self._send_rest()

    def _send_rest(self) -> None:
        """Ends a round, with zeros for what is missing."""
        while self._next < len(self._order):
            while len(self._under_way) >= self.in_flight:
                self._finish_first()
            self._send()
        if self._completed is not None:
            self._agree_on_order(self._completed)
        self._start_round()
        self.is_complete = True
        self.rounds += 1

    def _agree_on_order(self, completed: list[int]) -> None:
        """Sends buckets, from now on, in the order in which the first round completed them in the first process."""
        self.finish()
        completed = list(dict.fromkeys([*completed, *range(len(self._order))]))
        order = torch.tensor(completed, dtype=torch.int64, device=self.arenas[0].device)
        with explained("agreeing on the order of gradients with the first process"):
            dist.broadcast(order, self.groups.root, group=self.groups.process_group)
        agreed = order.tolist()
        new = {number: place for place, number in enumerate(agreed)}
        self._order = [self._order[number] for number in agreed]
        self._number = {key: new[number] for key, number in self._number.items()}
        self._filled = {new[number] for number in self._filled}
        self._completed = None

    def synchronize(self) -> None:
        """Sends what there is unless all has been, and waits."""
        self.take_all()
        if not self.is_complete and not self.groups.is_one:
            self._send_rest()
        self.finish()

    @torch.no_grad()
    def _send(self) -> None:
        place, number = self._order[self._next]
        arena = self.arenas[place]
        while self._under_way and self._is_done(self._under_way[0]):
            self._finish_first()
        if arena.gradient_buffer is not None:
            # What the last round sent is in the buffer until it has arrived.
            while any(sent.number == self._next for sent in self._under_way):
                self._finish_first()
        bucket = self._filled_bucket(place, number)
        shard = arena.shard(self.shards(arena), number)
        adds = self._next in self._filled
        if adds:
            shard = torch.empty_like(shard)
        self._filled.add(self._next)
        self._under_way.append(_Sent(arena, self._next, bucket, shard, self._reduce(bucket, shard), adds))
        self._next += 1

    def _filled_bucket(self, place: int, number: int) -> Tensor:
        """A bucket with the gradients that there are, and zeros elsewhere."""
        arena = self.arenas[place]
        pieces = arena.layout.pieces[number]
        if arena.gradient_buffer is not None:
            for piece in pieces:
                # A backward pass that is not over would add to what is under way.
                gradient = arena.params[piece.param].grad
                if gradient is not None and gradient.data_ptr() == arena.gradient_views[piece.param].data_ptr():
                    arena.params[piece.param].grad = None
            self._let_go(place, pieces)
            return arena.bucket(arena.gradient_buffer, number)
        bucket = torch.zeros(arena.layout.bucket_sizes[number], dtype=arena.dtypes.gradients, device=arena.device)
        sources, places = [], []
        for piece, view in zip(pieces, arena.layout.cut(bucket, number), strict=True):
            gradient = arena.gradients[piece.param]
            if gradient is not None:
                whole = flat(gradient)
                sources.append(whole if piece.size == len(whole) else whole[piece.start : piece.stop])
                places.append(view)
        if sources:
            torch._foreach_copy_(places, sources)
        self._let_go(place, pieces)
        return bucket

    def _let_go(self, place: int, pieces: Sequence[Piece]) -> None:
        """Forgets gradients of which no part is left to be sent."""
        arena = self.arenas[place]
        for piece in pieces:
            if all(self._number[place, bucket] <= self._next for bucket in arena.layout.buckets_of[piece.param]):
                arena.gradients[piece.param] = None
                self._own.discard((place, piece.param))

    def _reduce(self, bucket: Tensor, shard: Tensor) -> Work:
        groups = self.groups
        if groups.ranks == 1:
            shard.copy_(bucket)
        if groups.replicas == 1:
            if groups.ranks == 1:
                return Done()
            return reduce_scatter(shard, bucket, groups.distributed, self.average, _ADDING)
        # Two collectives, of which the second needs the first: on a stream of their own, so that nothing else waits.
        if self._stream is None and not on_host(bucket):
            self._stream = torch.Stream(bucket.device)
        with on_stream(self._stream):
            if groups.ranks > 1:
                first = reduce_scatter(shard, bucket, groups.distributed, self.average, _ADDING)
                if on_host(bucket):
                    return _Then(first, shard, groups.redundant, self.average)
                first.wait()
            return all_reduce(shard, groups.redundant, _ADDING, self.average)

    def _is_done(self, sent: _Sent) -> bool:
        """Whether a bucket has arrived; a device is not asked while its work is recorded into a graph."""
        asks = on_host(sent.bucket) or not torch.cuda.is_current_stream_capturing()
        return asks and sent.work.is_completed()

    def finish(self) -> None:
        """Waits for what is under way."""
        while self._under_way:
            self._finish_first()

    @torch.no_grad()
    def _finish_first(self) -> None:
        sent = self._under_way.popleft()
        sent.work.wait()
        if sent.adds:
            bucket = self._order[sent.number][1]
            sent.arena.shard(self.shards(sent.arena), bucket).add_(sent.shard)
        if sent.arena.gradient_buffer is not None:
            sent.bucket.zero_()  # further rounds add to it

    @torch.no_grad()
    def multiply(self, factor: Tensor, drop: Tensor | None) -> None:
        """Multiplies all gradients that there are, sent or not; between two rounds.

        `factor` is float32 [1]. Where `drop`, float32 [1], is not 0 they become zeros, even those that are not finite.
        """
        self.finish()
        self.version += 1
        for place, arena in enumerate(self.arenas):
            if self._filled:
                self.shards(arena).copy_(_multiplied(self.shards(arena), factor, drop))
            if arena.gradient_buffer is not None:
                self._take_strays(place)
                arena.gradient_buffer.copy_(_multiplied(arena.gradient_buffer, factor, drop))
                continue
            for index in range(len(arena.params)):
                self.take(place, index)
                gradient = arena.gradients[index]
                if gradient is not None:
                    # In the dtype of sums: half precision could not hold another scale.
                    arena.gradients[index] = _multiplied(gradient.to(arena.dtypes.gradients), factor, drop)
                    self._own.add((place, index))

    def _take_strays(self, place: int) -> None:
        """Takes gradients that are no views of the buffer; views stay where backward passes add to them."""
        arena = self.arenas[place]
        for index, view in enumerate(arena.gradient_views):
            gradient = arena.params[index].grad
            if gradient is not None and gradient.data_ptr() != view.data_ptr():
                self.take(place, index)

    @torch.no_grad()
    def tensors(self) -> list[Tensor]:
        """All gradients that there are, sent or not, in no order."""
        self.finish()
        found: list[Tensor] = []
        for arena in self.arenas:
            if self._filled:
                found.append(self.shards(arena))
            if arena.gradient_buffer is not None:
                found.append(arena.gradient_buffer)
            found.extend(
                gradient for gradient in (*arena.gradients, *map(_grad_of, arena.params)) if gradient is not None
            )
        return found

    # What the optimizer reads -----------------------------------------------------------------------------------------

    def shards(self, arena: Arena) -> Tensor:
        """This rank's flat shard of the sums; with more than one process, and after `synchronize`."""
        if arena.gradient_shard is None:
            arena.gradient_shard = arena.new_shard(arena.dtypes.gradients)
        return arena.gradient_shard

    def local(self, arena: Arena) -> list[Tensor]:
        """The gradients of `arena.parts`, flat, one by one; after `synchronize`."""
        return list(map(flat, self.of_units(arena, arena.parts)))

    def has_fixed(self, arena: Arena) -> bool:
        """Whether `of_units` gives the same tensors every time."""
        return not self.groups.is_one or arena.gradient_buffer is not None

    def of_units(self, arena: Arena, units: Sequence[_Unit]) -> list[Tensor]:
        """The gradients of stretches of this rank's flat shard; those of one process laid out like their parameters.

        All of one dtype: their own, or, where they have several, that in which they would travel.
        """
        if not self.groups.is_one:
            shards = self.shards(arena)
            return [shards[unit.flat : unit.flat + unit.size] for unit in units]
        if arena.gradient_buffer is not None:
            return [arena.gradient_buffer[unit.flat : unit.flat + unit.size] for unit in units]
        given = [arena.gradients[unit.param] for unit in units]
        present = [gradient for gradient in given if gradient is not None]
        dtypes = set(map(_dtype, present))
        if len(present) == len(given) and len(dtypes) == 1:
            return present
        dtype = dtypes.pop() if len(dtypes) == 1 else arena.dtypes.gradients
        return [
            self._nothing(unit.size, dtype, arena.device) if gradient is None else gradient.to(dtype)
            for unit, gradient in zip(units, given, strict=True)
        ]

    def _nothing(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros in the place of a gradient that there is not; only ever read."""
        zeros = self._zeros
        if zeros is None or len(zeros) < size or zeros.dtype != dtype or zeros.device != device:
            zeros = self._zeros = torch.zeros(size, dtype=dtype, device=device)
        return zeros[:size]


def _multiplied(gradient: Tensor, factor: Tensor, drop: Tensor | None) -> Tensor:
    product = (gradient * factor).to(gradient.dtype)
    return product if drop is None else product.masked_fill_(drop.reshape(()) != 0, 0.0)


class _Then:
    """A mean over replicas after a reduce-scatter, for the host, where nothing runs by itself."""

    def __init__(self, first: Work, shard: Tensor, group: Any, average: bool) -> None:
        self._first, self._shard, self._group, self._average = first, shard, group, average

    def wait(self) -> None:
        self._first.wait()
        all_reduce(self._shard, self._group, _ADDING, self._average).wait()

    def is_completed(self) -> bool:
        return False
