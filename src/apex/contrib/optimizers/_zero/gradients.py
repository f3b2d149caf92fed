"""Reduction of gradients over all processes, bucket by bucket, while backward passes go on.

A round sends every bucket of every arena once, in the same order in all processes: the first round in the order of the
layout, later rounds in the order of completion in the first. A backward pass is a round. At its end, buckets that
lack gradients are sent with zeros instead. Until then no process waits for another, because the other process may
itself be waiting for this one in another collective. Sums of several rounds are added. Gradients that are accumulated
before they are sent are added in the dtype `grad_sync_dtype`.

With one process nothing is sent or copied: `local` returns the gradients themselves.
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
from ....ops.multi_tensor.flat import flat, with_strides_of
from .arena import Arena
from .groups import Groups
from .layout import Piece, pick

_dtype = operator.attrgetter("dtype")
_grad_of = operator.attrgetter("grad")


# Names the collective in the error for processes that do not answer.
_ADDING = "adding up a bucket of gradients"


class ShardReducer(BucketReducer):
    """A reducer of gradients: each rank gets its shards of the sum, or with `average` of the mean, over all processes.

    Base of both optimizers' reducers, which differ in when they take gradients and send buckets.
    """

    def __init__(self, groups: Groups, average: bool) -> None:
        self.arenas: list[Arena] = []
        super().__init__()
        self.groups = groups
        self.average = average
        # For each bucket the index of its arena, and its index in the arena.
        self._buckets: list[tuple[int, int]] = []
        # The index of the first bucket of each arena.
        self._first: list[int] = []
        # Whether every process gets whole buckets: because it is the only rank, or because of an option.
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
        """Agree with all processes to send buckets in the order of their completion in this round."""
        self._agree_on_order(self.arenas[0].device, self.groups.process_group, self.groups.root)
        self._has_order = True

    def make_buffer(self, arena: Arena) -> None:
        """Give an arena a buffer for all its gradients."""
        if arena.gradient_buffer is None:
            arena.gradient_buffer = arena.new_buffer(arena.dtypes.gradients)

    def shards(self, arena: Arena) -> Tensor:
        """Return this rank's flat shard of the sums after a round; only with more than one process."""
        if arena.gradient_shard is None:
            arena.gradient_shard = arena.new_shard(arena.dtypes.gradients)
        return arena.gradient_shard

    def _buckets_of(self, arena_index: int, index: int) -> list[int]:
        """Return the buckets of parameter number `index` of an arena."""
        first = self._first[arena_index]
        return [first + number for number in self.arenas[arena_index].layout.buckets_of[index]]

    def _reduce(self, bucket: int, values: Tensor, shard: Tensor, factor: Tensor | None = None) -> Work:
        """Start the reduction of a bucket's values, times this process's `factor`; `shard` receives the result."""
        groups = self.arenas[self._buckets[bucket][0]].groups
        scatter = groups.scatter[bucket % len(groups.scatter)]
        reduce = groups.reduce[bucket % len(groups.reduce)]
        if self._gets_all or groups.ranks == 1:
            if shard.data_ptr() != values.data_ptr():
                shard.copy_(values)
            return Done() if groups.size == 1 else all_reduce(shard, reduce, _ADDING, self.average, factor)
        if groups.replicas == 1:
            return reduce_scatter(shard, values, scatter, self.average, _ADDING, factor)
        if self._stream is None and not on_host(values):
            self._stream = torch.Stream(values.device)
        return reduce_scatter_all_reduce(shard, values, (scatter, reduce), self.average, _ADDING, self._stream, factor)


class GradientSync(ShardReducer):
    """The reducer of DistributedFusedAdam, which takes gradients away from parameters.

    A bucket is allocated while it is being reduced. With `contiguous`, gradients are views of one lasting buffer
    instead. At the end of a round at most `in_flight` buckets are being reduced at a time.
    """

    def __init__(self, groups: Groups, *, average: bool = True, in_flight: int = 2, contiguous: bool = False) -> None:
        super().__init__(groups, average)
        self.in_flight = in_flight
        self.contiguous = contiguous
        # Whether a round has been completed since gradients were cleared, and nothing arrived after it.
        self.is_complete = False
        # Incremented whenever gradients change.
        self.version = 0
        # The number of rounds that have ended.
        self.rounds = 0
        # Buckets that hold sums of earlier rounds; gradients, as (arena index, index), that may be added to in place.
        self._filled: set[int] = set()
        self._own: set[tuple[int, int]] = set()

    def add(self, arena: Arena) -> None:
        super().add(arena)
        if self.contiguous:
            self.make_buffer(arena)

    def clear(self) -> None:
        """Drop all gradients."""
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

    # Without no_grad, which takes longer than the function: no tensor here requires gradients.
    def take(self, arena_index: int, index: int) -> None:
        """Take the gradient away from parameter number `index` of an arena; `param.grad` becomes None."""
        arena = self.arenas[arena_index]
        param = arena.params[index]
        gradient = param.grad
        if gradient is None:
            return
        check_dense(gradient)
        if not arena.layout.sizes[index]:
            param.grad = None  # an empty gradient is in no bucket, so it must not start a round
            return
        buckets = () if self.groups.is_one else self._buckets_of(arena_index, index)
        if not self._sent.isdisjoint(buckets):
            self._end_round()  # the bucket has been sent, so this gradient belongs to the next round
        param.grad = None
        self.is_complete = False
        self.version += 1
        gradient = with_strides_of(param, gradient.detach() if gradient.requires_grad else gradient)
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
        elif (arena_index, index) in self._own:
            before.add_(gradient)
        else:
            arena.gradients[index] = before.to(arena.dtypes.gradients, copy=True).add_(gradient)
            self._own.add((arena_index, index))

    def take_all(self) -> None:
        """Take the gradients of all parameters that have one."""
        for arena_index, arena in enumerate(self.arenas):
            for index, gradient in enumerate(map(_grad_of, arena.params)):
                if gradient is not None:
                    self.take(arena_index, index)

    def arrived(self, arena_index: int, index: int) -> None:
        """Take the gradient that a backward pass has finished with, and send buckets that are complete."""
        self.take(arena_index, index)
        self.announce(arena_index, index)

    def announce(self, arena_index: int, index: int) -> None:
        """Count the gradient of a parameter as complete, and send buckets that are complete."""
        if self.groups.is_one or not self.arenas[arena_index].layout.sizes[index]:
            return
        self.has_begun = True
        self._note(index, self._buckets_of(arena_index, index))
        self.flush_ready()
        if self._all_sent:
            self.end_round()

    def _start_round(self) -> None:
        super()._start_round()
        # Whether gradients of this round have arrived.
        self.has_begun = False

    def end_round(self) -> None:
        """Take all gradients and send the remaining buckets; all processes must call it."""
        self.take_all()
        self._end_round()

    def _end_round(self) -> None:
        """Send the remaining buckets, with zeros for missing gradients, and begin the next round."""
        self._send_rest(self.in_flight)
        if not self._has_order:
            self.finish()
            self._agree()
        self._start_round()
        self.is_complete = True
        self.rounds += 1

    def synchronize(self) -> None:
        """Send all gradients that have not been sent, and wait for all buckets."""
        self.take_all()
        if not self.is_complete and not self.groups.is_one:
            self._end_round()
        self.finish()

    @torch.no_grad()
    def _start(self, bucket: int) -> Sent:
        arena_index, number = self._buckets[bucket]
        arena = self.arenas[arena_index]
        while self._under_way and self._is_done(self._under_way[0]):
            self._finish_first()
        if arena.gradient_buffer is not None:
            # The collective of the last round still reads the buffer.
            while any(sent.bucket == bucket for sent in self._under_way):
                self._finish_first()
        values = self._filled_bucket(arena, number)
        self._drop_sent_gradients(arena_index, number)
        shard = arena.shard(self.shards(arena), number)
        # The sums of a later round are received apart, and then added to the earlier sums.
        result = torch.empty_like(shard) if bucket in self._filled else shard
        self._filled.add(bucket)
        return Sent(bucket, self._reduce(bucket, values, result), values, result)

    def _filled_bucket(self, arena: Arena, number: int) -> Tensor:
        """Return a bucket with the gradients that have arrived, and zeros elsewhere."""
        if arena.gradient_buffer is None:
            values = torch.zeros(arena.layout.bucket_sizes[number], dtype=arena.dtypes.gradients, device=arena.device)
            arena.copy_gradients(number, arena.layout.cut(values, number))
            return values
        views = arena.gradient_buffer.views
        for piece in arena.layout.pieces[number]:
            # Otherwise the running backward pass could add to memory that a collective reads.
            gradient = arena.params[piece.param].grad
            if gradient is not None and gradient.data_ptr() == views[piece.param].data_ptr():
                arena.params[piece.param].grad = None
        return arena.bucket(arena.gradient_buffer.values, number)

    def _drop_sent_gradients(self, arena_index: int, number: int) -> None:
        """Drop the gradients of a bucket whose other buckets have been sent too."""
        arena = self.arenas[arena_index]
        for piece in arena.layout.pieces[number]:
            if self._sent.issuperset(self._buckets_of(arena_index, piece.param)):
                arena.gradients[piece.param] = None
                self._own.discard((arena_index, piece.param))

    def _is_done(self, sent: Sent) -> bool:
        """Return whether a bucket has arrived; False during graph capture, which forbids querying the device."""
        may_query = on_host(self.arenas[0].params[0]) or not torch.cuda.is_current_stream_capturing()
        return may_query and sent.work.is_completed()

    @torch.no_grad()
    def _receive(self, sent: Sent) -> None:
        assert sent.values is not None
        assert sent.result is not None
        arena_index, number = self._buckets[sent.bucket]
        arena = self.arenas[arena_index]
        shard = arena.shard(self.shards(arena), number)
        if sent.result.data_ptr() != shard.data_ptr():
            shard.add_(sent.result)
        if arena.gradient_buffer is not None:
            sent.values.zero_()  # later gradients are added to the buffer

    @torch.no_grad()
    def multiply(self, factor: Tensor, drop: Tensor | None) -> None:
        """Multiply all gradients, sent or not, by `factor`, float32 [1]; between two rounds.

        If `drop`, float32 [1], is not 0, gradients become zeros, even non-finite ones.
        """
        self.finish()
        self.version += 1
        for arena_index, arena in enumerate(self.arenas):
            if self._filled:
                self.shards(arena).copy_(_multiplied(self.shards(arena), factor, drop))
            if arena.gradient_buffer is not None:
                self._take_outside(arena_index, arena.gradient_buffer.views)
                values = arena.gradient_buffer.values
                values.copy_(_multiplied(values, factor, drop))
                continue
            for index in range(len(arena.params)):
                self.take(arena_index, index)
                gradient = arena.gradients[index]
                if gradient is not None:
                    # In the dtype of the sums, because half precision might not hold the product.
                    arena.gradients[index] = _multiplied(gradient.to(arena.dtypes.gradients), factor, drop)
                    self._own.add((arena_index, index))

    def _take_outside(self, arena_index: int, views: Sequence[Tensor]) -> None:
        """Take gradients that lie outside of the buffer; backward passes go on adding to its views."""
        arena = self.arenas[arena_index]
        for index, view in enumerate(views):
            gradient = arena.params[index].grad
            if gradient is not None and gradient.data_ptr() != view.data_ptr():
                self.take(arena_index, index)

    @torch.no_grad()
    def tensors(self) -> list[Tensor]:
        """Return all gradients, sent or not, in no particular order."""
        self.finish()
        tensors: list[Tensor] = []
        for arena in self.arenas:
            if self._filled:
                tensors.append(self.shards(arena))
            if arena.gradient_buffer is not None:
                tensors.append(arena.gradient_buffer.values)
            tensors.extend(
                gradient for gradient in (*arena.gradients, *map(_grad_of, arena.params)) if gradient is not None
            )
        return tensors

    def local(self, arena: Arena) -> list[Tensor]:
        """Return the gradients of `arena.parts` as 1-D tensors, after `synchronize`."""
        return list(map(flat, self.of_units(arena, arena.parts)))

    def stay_in_place(self, arena: Arena) -> bool:
        """Return whether `of_units` returns the same tensors at every step."""
        return not self.groups.is_one or arena.gradient_buffer is not None

    def of_units(self, arena: Arena, units: Sequence[Piece]) -> list[Tensor]:
        """Return the gradients of `units`, which are pieces of this rank's flat shard.

        With one process they are laid out like their parameters. All have one dtype: `grad_sync_dtype` if gradients
        of several dtypes would have to be returned.
        """
        if not self.groups.is_one:
            return pick(self.shards(arena), units)
        if arena.gradient_buffer is not None:
            return pick(arena.gradient_buffer.values, units)
        gradients = [arena.gradients[unit.param] for unit in units]
        present = [gradient for gradient in gradients if gradient is not None]
        dtypes = set(map(_dtype, present))
        if len(present) == len(gradients) and len(dtypes) == 1:
            return present
        dtype = dtypes.pop() if len(dtypes) == 1 else arena.dtypes.gradients
        missing = [unit.size for unit, gradient in zip(units, gradients, strict=True) if gradient is None]
        zeros = torch.zeros(max(missing, default=0), dtype=dtype, device=arena.device)  # shared: only read
        return [
            zeros[: unit.size] if gradient is None else gradient.to(dtype)
            for unit, gradient in zip(units, gradients, strict=True)
        ]


def _multiplied(gradient: Tensor, factor: Tensor, drop: Tensor | None) -> Tensor:
    product = (gradient * factor).to(gradient.dtype)
    return product if drop is None else product.masked_fill_(drop.reshape(()) != 0, 0.0)


def check_dense(gradient: Tensor) -> None:
    """Raise an error if a gradient is sparse."""
    if gradient.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of a parameter of shape {tuple(gradient.shape)} is sparse; only dense ones are divided "
            "among processes: use sparse=False in embeddings"
        )
