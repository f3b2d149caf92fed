"""All-gather of updated parameters, bucket by bucket: all at once, or while the next forward pass goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...._distributed.collectives import Done, Work, all_gather
from .arena import Arena, ParameterViews
from .groups import Groups

# (arena index, index of the bucket in the arena)
_Key = tuple[int, int]


@dataclass
class _Gathered:
    """A bucket that is being gathered."""

    key: _Key
    bucket: Tensor
    work: Work


class ParameterSync:
    """The exchange of updated parameters: an optimizer fills the arenas' `outgoing` shards, and all ranks gather them.

    At most `in_flight` buckets are gathered at a time. Each is allocated for that; with `contiguous`, parameters are
    views of one lasting buffer that receives them.
    """

    def __init__(self, groups: Groups, *, in_flight: int = 2, contiguous: bool = False) -> None:
        self.groups = groups
        self.in_flight = in_flight
        self.contiguous = contiguous
        self.arenas: list[Arena] = []
        # Updated buckets that have not been sent, in the order of sending.
        self._waiting: deque[_Key] = deque()
        self._under_way: deque[_Gathered] = deque()
        # For each bucket, views of the parameters that it is copied to.
        self._targets: dict[_Key, ParameterViews] = {}

    def add(self, arena: Arena) -> None:
        """Add an arena whose parameters will be exchanged."""
        if self.contiguous:
            self.make_buffer(arena)
        for number, pieces in enumerate(arena.layout.pieces):
            self._targets[len(self.arenas), number] = ParameterViews(arena, pieces)
        self.arenas.append(arena)

    @torch.no_grad()
    def make_buffer(self, arena: Arena) -> None:
        """Make the parameters of an arena views of one buffer."""
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
        """Mark all buckets as updated.

        Buckets are sent from the last to the first: gradients arrive in the order of the layout, so that forward passes
        need the last parameters first.
        """
        keys = [(index, bucket) for index, arena in enumerate(self.arenas) for bucket in range(len(arena.outgoing))]
        self._waiting = deque(reversed(keys))

    @property
    def is_complete(self) -> bool:
        """Return whether all parameters have their new values."""
        return not self._waiting and not self._under_way

    @property
    def left(self) -> set[tuple[int, int]]:
        """Return the buckets, as (arena index, bucket), that have not been copied to parameters yet."""
        return {*self._waiting, *(gathered.key for gathered in self._under_way)}

    def start(self) -> None:
        """Start gathering buckets, up to `in_flight`."""
        while self._waiting and len(self._under_way) < self.in_flight:
            self._send(self._waiting.popleft())

    def wait_for(self, keys: Iterable[tuple[int, int]]) -> None:
        """Wait for buckets, given as (arena index, bucket), and for buckets sent earlier; start more."""
        wanted = set(keys)
        while wanted & self.left:
            self.start()
            self._finish_first()
        self.start()

    def synchronize(self) -> None:
        """Send and wait for all buckets."""
        while not self.is_complete:
            self.start()
            self._finish_first()

    def _send(self, key: _Key) -> None:
        arena_index, number = key
        arena = self.arenas[arena_index]
        shard, size = arena.outgoing[number], arena.layout.bucket_sizes[number]
        if arena.sent_bytes is not None:
            shard, size = _truncated(shard, arena.sent_bytes), size * arena.sent_bytes
        if arena.groups.ranks == 1:
            self._under_way.append(_Gathered(key, shard, Done()))
            return
        if arena.parameter_buffer is not None and arena.sent_bytes is None:
            bucket = arena.bucket(arena.parameter_buffer.values, number)
        else:
            bucket = torch.empty(size, dtype=shard.dtype, device=arena.device)
        group = arena.groups.gather[number % len(arena.groups.gather)]
        work = all_gather(bucket, shard, group, "sending a bucket of updated parameters")
        self._under_way.append(_Gathered(key, bucket, work))

    @torch.no_grad()
    def _finish_first(self) -> None:
        gathered = self._under_way.popleft()
        gathered.work.wait()
        arena_index, number = gathered.key
        arena, bucket = self.arenas[arena_index], gathered.bucket
        if arena.sent_bytes is not None:
            bucket = _extended(bucket, arena.sent_bytes, arena.dtypes.parameters)
        if arena.parameter_buffer is None:
            torch._foreach_copy_(self._targets[gathered.key](), list(arena.layout.cut(bucket, number)))
        elif arena.sent_bytes is not None:
            arena.bucket(arena.parameter_buffer.values, number).copy_(bucket)


def _truncated(values: Tensor, count: int) -> Tensor:
    """Return the `count` most significant bytes of each value, uint8 [elements * count]; values are little-endian."""
    return _bytes_of(values)[:, -count:].reshape(-1)


def _extended(received: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return values with the received most significant bytes, and zeros in the other bytes."""
    values = torch.zeros(len(received) // count, dtype=dtype, device=received.device)
    _bytes_of(values)[:, -count:] = received.view(-1, count)
    return values


def _bytes_of(values: Tensor) -> Tensor:
    """Return the values' memory as uint8 [elements, bytes per element]."""
    return values.view(torch.uint8).view(len(values), values.element_size())
