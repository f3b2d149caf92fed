"""From updated shards to parameters, bucket by bucket: all at once, or while the next forward pass goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...._distributed.collectives import Done, Work, all_gather
from . import upper_bytes
from .arena import Arena
from .groups import Groups

_Key = tuple[int, int]


@dataclass
class _Gathered:
    """A bucket that is being put together."""

    key: _Key
    bucket: Tensor
    work: Work


@dataclass
class _Copy:
    """Where the elements of a bucket go, while the parameters are at these addresses."""

    addresses: list[int]
    places: list[Tensor] = field(default_factory=list)


class ParameterSync:
    """The parameters of some arenas, whose `outgoing` shards an optimizer has filled.

    `in_flight` buckets may be under way at a time; each takes its whole size in memory, unless `contiguous`: then
    parameters are views of a buffer that they arrive in. `turns` are process groups that take turns with the buckets,
    where it is not that of `groups` alone.
    """

    def __init__(
        self, groups: Groups, *, in_flight: int = 2, contiguous: bool = False, turns: Sequence[Any] = ()
    ) -> None:
        self.groups = groups
        self._turns = turns or (groups.distributed,)
        self.in_flight = in_flight
        self.contiguous = contiguous
        self.arenas: list[Arena] = []
        # Buckets that an update has changed and that have not been sent, in the order in which they will be.
        self._waiting: deque[_Key] = deque()
        self._under_way: deque[_Gathered] = deque()
        self._copies: dict[_Key, _Copy] = {}

    def add(self, arena: Arena) -> None:
        """Takes care of one more arena."""
        if self.contiguous:
            self.make_buffer(arena)
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
        buffer = arena.allocate(arena.layout.size, dtype=arena.dtypes.parameters, device=arena.device)
        views = [arena.view(buffer, index) for index in range(len(arena.params))]
        torch._foreach_copy_(views, [param.detach() for param in arena.params])
        for param, view in zip(arena.params, views, strict=True):
            param.data = view
        arena.parameter_buffer = buffer

    # Which buckets ----------------------------------------------------------------------------------------------------

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
        """The (arena, bucket)s that parameters have not got yet."""
        return {*self._waiting, *(each.key for each in self._under_way)}

    def start(self) -> None:
        """Sends as many buckets as may be under way."""
        while self._waiting and len(self._under_way) < self.in_flight:
            self._send(self._waiting.popleft())

    def wait_for(self, keys: Iterable[tuple[int, int]]) -> None:
        """Waits for (arena, bucket)s, and for all that are sent before them; sends further ones."""
        wanted = set(keys)
        while wanted & self.left:
            self.start()
            self._finish_first()
        self.start()

    def synchronize(self) -> None:
        """Waits for all."""
        while not self.is_complete:
            self.start()
            self._finish_first()

    # How --------------------------------------------------------------------------------------------------------------

    def _send(self, key: _Key) -> None:
        place, number = key
        arena = self.arenas[place]
        shard, size = arena.outgoing[number], arena.layout.bucket_sizes[number]
        if arena.sent_bytes is not None:
            shard, size = upper_bytes.taken(shard, arena.sent_bytes), size * arena.sent_bytes
        if self.groups.ranks == 1:
            self._under_way.append(_Gathered(key, shard, Done()))
            return
        if arena.parameter_buffer is not None and arena.sent_bytes is None:
            bucket = arena.bucket(arena.parameter_buffer, number)
        else:
            bucket = torch.empty(size, dtype=shard.dtype, device=arena.device)
        group = self._turns[number % len(self._turns)]
        work = all_gather(bucket, shard, group, "sending a bucket of updated parameters")
        self._under_way.append(_Gathered(key, bucket, work))

    @torch.no_grad()
    def _finish_first(self) -> None:
        gathered = self._under_way.popleft()
        gathered.work.wait()
        place, number = gathered.key
        arena, bucket = self.arenas[place], gathered.bucket
        if arena.sent_bytes is not None:
            bucket = upper_bytes.restored(bucket, arena.sent_bytes, arena.dtypes.parameters)
        if arena.parameter_buffer is None:
            torch._foreach_copy_(self._copy_of(gathered.key).places, list(arena.layout.cut(bucket, number)))
        elif arena.sent_bytes is not None:
            arena.bucket(arena.parameter_buffer, number).copy_(bucket)

    def _copy_of(self, key: _Key) -> _Copy:
        place, number = key
        arena = self.arenas[place]
        pieces = arena.layout.pieces[number]
        addresses = [arena.params[piece.param].data_ptr() for piece in pieces]
        copy = self._copies.get(key)
        if copy is None or copy.addresses != addresses:
            copy = self._copies[key] = _Copy(addresses)
            flats = arena.flat_params()
            for piece in pieces:
                copy.places.append(flats[piece.param][piece.start : piece.stop])
        return copy
