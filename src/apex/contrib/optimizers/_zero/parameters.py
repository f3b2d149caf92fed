"""From updated shards to parameters, bucket by bucket: all at once, or while the next forward pass goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...._distributed.collectives import Done, Work, all_gather
from .arena import Arena, ParameterViews
from .groups import Groups

_Key = tuple[int, int]


@dataclass
class _Gathered:
    """A bucket that is being put together."""

    key: _Key
    bucket: Tensor
    work: Work


class ParameterSync:
    """The parameters of some arenas, whose `outgoing` shards an optimizer has filled.

    `in_flight` buckets may be under way at a time; each takes its whole size in memory, unless `contiguous`: then
    parameters are views of a buffer that they arrive in.
    """

    def __init__(self, groups: Groups, *, in_flight: int = 2, contiguous: bool = False) -> None:
        self.groups = groups
        self.in_flight = in_flight
        self.contiguous = contiguous
        self.arenas: list[Arena] = []
        # Buckets that an update has changed and that have not been sent, in the order in which they will be.
        self._waiting: deque[_Key] = deque()
        self._under_way: deque[_Gathered] = deque()
        # Of each bucket where its elements go.
        self._targets: dict[_Key, ParameterViews] = {}

    def add(self, arena: Arena) -> None:
        """Adds an arena."""
        if self.contiguous:
            self.make_buffer(arena)
        for number, pieces in enumerate(arena.layout.pieces):
            self._targets[len(self.arenas), number] = ParameterViews(arena, pieces)
        self.arenas.append(arena)

    @torch.no_grad()
    def make_buffer(self, arena: Arena) -> None:
        """Makes the parameters of an arena views of one buffer."""
        if arena.parameter_buffer is not None:
            return
        for index, param in enumerate(arena.params):
            if param.dtype != arena.dtypes.parameters:
                raise RuntimeError(
                    f"parameter {index} of shape {tuple(param.shape)} is {param.dtype} and cannot be a view of a "
                    f"buffer of {arena.dtypes.parameters}: contiguous_param_buffer needs param_sync_dtype={param.dtype}"
                )
        arena.parameter_buffer = arena.new_buffer(arena.dtypes.parameters)
        arena.parameter_buffer.adopt(arena.params)

    def updated(self) -> None:
        """Says that the outgoing shards of all buckets are new.

        Buckets are sent from the last to the first: gradients arrive in the order of the layout, so that forward passes
        need the last parameters first.
        """
        keys = [(place, bucket) for place, arena in enumerate(self.arenas) for bucket in range(len(arena.outgoing))]
        self._waiting = deque(reversed(keys))

    @property
    def is_complete(self) -> bool:
        """Whether all parameters have their new values."""
        return not self._waiting and not self._under_way

    @property
    def left(self) -> set[tuple[int, int]]:
        """The buckets, as (arena, bucket), that have not been copied to parameters yet."""
        return {*self._waiting, *(each.key for each in self._under_way)}

    def start(self) -> None:
        """Sends as many buckets as may be under way."""
        while self._waiting and len(self._under_way) < self.in_flight:
            self._send(self._waiting.popleft())

    def wait_for(self, keys: Iterable[tuple[int, int]]) -> None:
        """Waits for buckets, given as (arena, bucket), and for those sent before them; sends further ones."""
        wanted = set(keys)
        while wanted & self.left:
            self.start()
            self._finish_first()
        self.start()

    def synchronize(self) -> None:
        """Waits for all buckets."""
        while not self.is_complete:
            self.start()
            self._finish_first()

    def _send(self, key: _Key) -> None:
        place, number = key
        arena = self.arenas[place]
        shard, size = arena.outgoing[number], arena.layout.bucket_sizes[number]
        if arena.sent_bytes is not None:
            shard, size = _truncated(shard, arena.sent_bytes), size * arena.sent_bytes
        if self.groups.ranks == 1:
            self._under_way.append(_Gathered(key, shard, Done()))
            return
        if arena.parameter_buffer is not None and arena.sent_bytes is None:
            bucket = arena.bucket(arena.parameter_buffer.values, number)
        else:
            bucket = torch.empty(size, dtype=shard.dtype, device=arena.device)
        group = self.groups.gather[number % len(self.groups.gather)]
        work = all_gather(bucket, shard, group, "sending a bucket of updated parameters")
        self._under_way.append(_Gathered(key, bucket, work))

    @torch.no_grad()
    def _finish_first(self) -> None:
        gathered = self._under_way.popleft()
        gathered.work.wait()
        place, number = gathered.key
        arena, bucket = self.arenas[place], gathered.bucket
        if arena.sent_bytes is not None:
            bucket = _extended(bucket, arena.sent_bytes, arena.dtypes.parameters)
        if arena.parameter_buffer is None:
            torch._foreach_copy_(self._targets[gathered.key](), list(arena.layout.cut(bucket, number)))
        elif arena.sent_bytes is not None:
            arena.bucket(arena.parameter_buffer.values, number).copy_(bucket)


def _truncated(values: Tensor, count: int) -> Tensor:
    """The `count` most significant bytes of each value, as a vector of bytes; numbers are little-endian."""
    return _bytes_of(values)[:, -count:].reshape(-1)


def _extended(received: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Values with these most significant bytes and zeros in the others: the last bits of mantissas are cut off."""
    values = torch.zeros(len(received) // count, dtype=dtype, device=received.device)
    _bytes_of(values)[:, -count:] = received.view(-1, count)
    return values


def _bytes_of(values: Tensor) -> Tensor:
    """[elements, bytes of each], in the memory of the values."""
    return values.view(torch.uint8).view(len(values), values.element_size())
