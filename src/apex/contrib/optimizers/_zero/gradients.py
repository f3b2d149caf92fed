"""From gradients of parameters to sums over all processes, bucket by bucket, while backward passes go on.

A round sends every bucket of every arena once, in the same order in all processes, whatever their backward passes
produced: the order of the layout at first, then that in which the first round's buckets became complete. A backward
pass is a round: at its end buckets that lack gradients are sent with zeros in their place. Nothing waits for other
processes before that: they may have got less far, and wait for this one in a collective of their own. Sums of several
rounds add up. Gradients that are added to before they are sent add up in the dtype that they travel in.

With one process nothing is sent and nothing copied: the gradients themselves are what `local` returns.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...._distributed.collectives import Done, Work, all_reduce, reduce_scatter, reduce_scatter_all_reduce
from ...._distributed.reducer import BucketReducer, Sent
from ....ops._host import on_host
from ....ops.multi_tensor.flat import flat
from .arena import Arena, laid_out_like
from .groups import Groups
from .layout import Piece, pick

_dtype = operator.attrgetter("dtype")
_grad_of = operator.attrgetter("grad")


# What is said where other processes do not answer.
_ADDING = "adding up a bucket of gradients"


class ShardReducer(BucketReducer):
    """Sums, or with `average` means, over all processes of `groups`, of which each rank gets its shards.

    What both optimizers do; they differ in when they take gradients and send buckets.
    """

    def __init__(self, groups: Groups, average: bool) -> None:
        self.arenas: list[Arena] = []
        super().__init__()
        self.groups = groups
        self.average = average
        # Of each bucket the number of its arena, and its own there.
        self._buckets: list[tuple[int, int]] = []
        # The first bucket of each arena.
        self._first: list[int] = []
        # Whether every process gets whole buckets: there is nobody to divide them with, or an option says so.
        self._gets_all = groups.ranks == 1
        # Whether all processes have agreed on the order of sending buckets.
        self._has_order = False
        self._stream: Any = None

    def add(self, arena: Arena) -> None:
        """Add an arena, between two rounds and in all processes; buckets are sent in the order of the layouts."""
        self.finish()
        self._has_order = False
        self._first.append(len(self._buckets))
        self._buckets += [(len(self.arenas), number) for number in range(len(arena.layout.bucket_sizes))]
        self.arenas.append(arena)
        self._set_buckets({piece.param for piece in pieces} for arena in self.arenas for pieces in arena.layout.pieces)

    def _agree(self) -> None:
        """Agree with all processes to send buckets in the order in which this round completed them."""
        self._agree_on_order(self.arenas[0].device, self.groups.process_group, self.groups.root)
        self._has_order = True

    def make_buffer(self, arena: Arena) -> None:
        """Gives an arena a buffer for all its gradients."""
        if arena.gradient_buffer is None:
            arena.gradient_buffer = arena.new_buffer(arena.dtypes.gradients)

    def shards(self, arena: Arena) -> Tensor:
        """This rank's flat shard of the sums, after the end of a round; with more than one process."""
        if arena.gradient_shard is None:
            arena.gradient_shard = arena.new_shard(arena.dtypes.gradients)
        return arena.gradient_shard

    def _buckets_of(self, place: int, index: int) -> list[int]:
        """The buckets of a parameter, given by the number of its arena and its own in it."""
        first = self._first[place]
        return [first + number for number in self.arenas[place].layout.buckets_of[index]]

    def _reduce(self, bucket: int, values: Tensor, shard: Tensor, factor: Tensor | None = None) -> Work:
        """Starts the sum of a bucket's values, times each process's `factor`, of which `shard` becomes a part."""
        scatter = self.groups.scatter[bucket % len(self.groups.scatter)]
        reduce = self.groups.reduce[bucket % len(self.groups.reduce)]
        if self._gets_all:
            if shard.data_ptr() != values.data_ptr():
                shard.copy_(values)
            return Done() if self.groups.is_one else all_reduce(shard, reduce, _ADDING, self.average, factor)
        if self.groups.replicas == 1:
            return reduce_scatter(shard, values, scatter, self.average, _ADDING, factor)
        if self._stream is None and not on_host(values):
            self._stream = torch.Stream(values.device)
        return reduce_scatter_all_reduce(shard, values, (scatter, reduce), self.average, _ADDING, self._stream, factor)


class GradientSync(ShardReducer):
    """The gradients of some arenas.

    A bucket that is under way takes its whole size in memory, unless `contiguous`: then gradients are views of a buffer
    that stays. When a round is ended `in_flight` buckets at most are under way at a time.
    """

    def __init__(self, groups: Groups, *, average: bool = True, in_flight: int = 2, contiguous: bool = False) -> None:
        super().__init__(groups, average)
        self.in_flight = in_flight
        self.contiguous = contiguous
        # Whether a round has been completed since gradients were cleared, and nothing arrived after it.
        self.is_complete = False
        # Grows whenever gradients change.
        self.version = 0
        # How many rounds have ended.
        self.rounds = 0
        # Buckets that have been sent, and gradients that are sums made here: these may be added to in place.
        self._filled: set[int] = set()
        self._own: set[tuple[int, int]] = set()

    # Arenas and buffers -----------------------------------------------------------------------------------------------

    def add(self, arena: Arena) -> None:
        super().add(arena)
        if self.contiguous:
            self.make_buffer(arena)

    def clear(self) -> None:
        """Forgets all gradients."""
        self.finish()
        for arena in self.arenas:
            arena.gradients = [None] * len(arena.params)
            if arena.gradient_buffer is not None:
                arena.gradient_buffer.values.zero_()
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
        check_dense(gradient)
        if not arena.layout.sizes[index]:
            param.grad = None  # nothing that another round would be for
            return
        buckets = () if self.groups.is_one else self._buckets_of(place, index)
        if not self._sent.isdisjoint(buckets):
            self._end_round()  # a part of it, or all, is gone: this belongs to the next round
        param.grad = None
        self.is_complete = False
        self.version += 1
        gradient = laid_out_like(gradient.detach() if gradient.requires_grad else gradient, param)
        if arena.gradient_buffer is not None:
            while any(sent.bucket in buckets for sent in self._under_way):
                self._finish_first()
            view = arena.gradient_buffer.views[index]
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
        """Take the gradient that a backward pass has finished with, and send buckets that are complete."""
        self.take(place, index)
        self.announce(place, index)

    def announce(self, place: int, index: int) -> None:
        """Count the gradient of a parameter of arena number `place` as complete, and send buckets that are complete."""
        if self.groups.is_one or not self.arenas[place].layout.sizes[index]:
            return
        self.has_begun = True
        self._note(index, self._buckets_of(place, index))
        self.flush_ready()
        if self._all_sent:
            self.end_round()

    # Rounds -----------------------------------------------------------------------------------------------------------

    def _start_round(self) -> None:
        super()._start_round()
        # Whether gradients of this round have arrived.
        self.has_begun = False

    def end_round(self) -> None:
        """Takes every gradient that there is, and sends what has not been sent; all processes must."""
        self.take_all()
        self._end_round()

    def _end_round(self) -> None:
        """Ends a round, with zeros for what is missing."""
        self._send_rest(self.in_flight)
        if not self._has_order:
            self.finish()
            self._agree()
        self._start_round()
        self.is_complete = True
        self.rounds += 1

    def synchronize(self) -> None:
        """Sends what there is unless all has been, and waits."""
        self.take_all()
        if not self.is_complete and not self.groups.is_one:
            self._end_round()
        self.finish()

    @torch.no_grad()
    def _start(self, bucket: int) -> Sent:
        place, number = self._buckets[bucket]
        arena = self.arenas[place]
        while self._under_way and self._is_done(self._under_way[0]):
            self._finish_first()
        if arena.gradient_buffer is not None:
            # What the last round sent is in the buffer until it has arrived.
            while any(sent.bucket == bucket for sent in self._under_way):
                self._finish_first()
        values = self._filled_bucket(arena, number)
        self._forget_gradients(place, number)
        shard = arena.shard(self.shards(arena), number)
        # Sums of further rounds are added to those that are there.
        result = torch.empty_like(shard) if bucket in self._filled else shard
        self._filled.add(bucket)
        return Sent(bucket, self._reduce(bucket, values, result), values, result)

    def _filled_bucket(self, arena: Arena, number: int) -> Tensor:
        """A bucket with the gradients that there are, and zeros elsewhere."""
        if arena.gradient_buffer is None:
            values = torch.zeros(arena.layout.bucket_sizes[number], dtype=arena.dtypes.gradients, device=arena.device)
            arena.copy_gradients(number, arena.layout.cut(values, number))
            return values
        views = arena.gradient_buffer.views
        for piece in arena.layout.pieces[number]:
            # A backward pass that is not over would add to what is under way.
            gradient = arena.params[piece.param].grad
            if gradient is not None and gradient.data_ptr() == views[piece.param].data_ptr():
                arena.params[piece.param].grad = None
        return arena.bucket(arena.gradient_buffer.values, number)

    def _forget_gradients(self, place: int, number: int) -> None:
        """Forgets gradients of a bucket of which no part is left to be sent."""
        arena = self.arenas[place]
        for piece in arena.layout.pieces[number]:
            if self._sent.issuperset(self._buckets_of(place, piece.param)):
                arena.gradients[piece.param] = None
                self._own.discard((place, piece.param))

    def _is_done(self, sent: Sent) -> bool:
        """Whether a bucket has arrived; a device is not asked while its work is recorded into a graph."""
        asks = on_host(self.arenas[0].params[0]) or not torch.cuda.is_current_stream_capturing()
        return asks and sent.work.is_completed()

    @torch.no_grad()
    def _receive(self, sent: Sent) -> None:
        assert sent.values is not None
        assert sent.result is not None
        place, number = self._buckets[sent.bucket]
        arena = self.arenas[place]
        shard = arena.shard(self.shards(arena), number)
        if sent.result.data_ptr() != shard.data_ptr():
            shard.add_(sent.result)
        if arena.gradient_buffer is not None:
            sent.values.zero_()  # further rounds add to it

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
                self._take_outside(place, arena.gradient_buffer.views)
                values = arena.gradient_buffer.values
                values.copy_(_multiplied(values, factor, drop))
                continue
            for index in range(len(arena.params)):
                self.take(place, index)
                gradient = arena.gradients[index]
                if gradient is not None:
                    # In the dtype of sums: half precision could not hold another scale.
                    arena.gradients[index] = _multiplied(gradient.to(arena.dtypes.gradients), factor, drop)
                    self._own.add((place, index))

    def _take_outside(self, place: int, views: Sequence[Tensor]) -> None:
        """Takes gradients that lie outside the buffer; views of the buffer stay, since backward passes add to them."""
        arena = self.arenas[place]
        for index, view in enumerate(views):
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
                found.append(arena.gradient_buffer.values)
            found.extend(
                gradient for gradient in (*arena.gradients, *map(_grad_of, arena.params)) if gradient is not None
            )
        return found

    # What the optimizer reads -----------------------------------------------------------------------------------------

    def local(self, arena: Arena) -> list[Tensor]:
        """The gradients of `arena.parts` as vectors, after `synchronize`."""
        return list(map(flat, self.of_units(arena, arena.parts)))

    def stay_in_place(self, arena: Arena) -> bool:
        """Whether `of_units` gives the same tensors every time."""
        return not self.groups.is_one or arena.gradient_buffer is not None

    def of_units(self, arena: Arena, units: Sequence[Piece]) -> list[Tensor]:
        """The gradients of stretches of this rank's flat shard; those of one process laid out like their parameters.

        All of one dtype: their own, or, where they have several, that in which they would travel.
        """
        if not self.groups.is_one:
            return pick(self.shards(arena), units)
        if arena.gradient_buffer is not None:
            return pick(arena.gradient_buffer.values, units)
        given = [arena.gradients[unit.param] for unit in units]
        present = [gradient for gradient in given if gradient is not None]
        dtypes = set(map(_dtype, present))
        if len(present) == len(given) and len(dtypes) == 1:
            return present
        dtype = dtypes.pop() if len(dtypes) == 1 else arena.dtypes.gradients
        missing = [unit.size for unit, gradient in zip(units, given, strict=True) if gradient is None]
        zeros = torch.zeros(max(missing, default=0), dtype=dtype, device=arena.device)  # for all of them: only read
        return [
            zeros[: unit.size] if gradient is None else gradient.to(dtype)
            for unit, gradient in zip(units, given, strict=True)
        ]


def _multiplied(gradient: Tensor, factor: Tensor, drop: Tensor | None) -> Tensor:
    product = (gradient * factor).to(gradient.dtype)
    return product if drop is None else product.masked_fill_(drop.reshape(()) != 0, 0.0)


def check_dense(gradient: Tensor) -> None:
    """Raises for a sparse gradient."""
    if gradient.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of a parameter of shape {tuple(gradient.shape)} is sparse; only dense ones are divided "
            "among processes: use sparse=False in embeddings"
        )
