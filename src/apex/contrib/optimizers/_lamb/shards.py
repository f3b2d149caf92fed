"""What this process holds of some parameters: their masters and moments, and what is sent of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....optimizers._base import state_dtype
from .._zero.arena import ALIGNMENT, Arena, Dtypes
from .._zero.groups import Groups
from .._zero.layout import round_up
from .._zero.state import PARAM
from .update import Owned


def make_arena(params: Sequence[Tensor], owners: Sequence[int], groups: Groups, buckets: int) -> Arena:
    """Parameters of one dtype and device, in about so many buckets."""
    dtype = params[0].dtype
    alignment = max(1, ALIGNMENT // dtype.itemsize)
    elements = sum(round_up(param.numel(), alignment) for param in params)
    size = round_up(-(-elements // buckets), groups.ranks * alignment)
    return Arena(params, owners, Dtypes(state_dtype(params[0]), dtype, dtype), groups, size * dtype.itemsize)


class Shards:
    """`master`, `exp_avg` and `exp_avg_sq` are flat shards of an arena, which the masters are copied from.

    With `in_bytes` parameters are sent as 8-bit floats.
    """

    # Of the state, in checkpoints that any number of processes can load.
    names = ("exp_avg", "exp_avg_sq")

    def __init__(self, arena: Arena, in_bytes: bool) -> None:
        self.arena = arena
        self.master = arena.new_shard(arena.dtypes.state)
        self.exp_avg = arena.new_shard(arena.dtypes.state)
        self.exp_avg_sq = arena.new_shard(arena.dtypes.state)
        flats = arena.flat_params()
        for piece in arena.owned:
            self.master[piece.flat : piece.flat + piece.size].copy_(flats[piece.param][piece.start : piece.stop])
        numbers = range(len(arena.layout.bucket_sizes))
        self._bytes: Tensor | None = None
        if in_bytes:
            self._bytes = arena.new_shard(torch.float8_e5m2)
            arena.outgoing = [arena.shard(self._bytes, number) for number in numbers]
            # Parameters may be views of a buffer, but what arrives has another dtype than it.
            arena.parameter_buffer = None
        elif arena.parameter_buffer is not None:
            buffer = arena.parameter_buffer
            arena.outgoing = [arena.shard_of_bucket(arena.bucket(buffer, number)) for number in numbers]
        elif arena.dtypes.parameters == arena.dtypes.state:
            arena.outgoing = [arena.shard(self.master, number) for number in numbers]
        else:
            sent = arena.new_shard(arena.dtypes.parameters)
            arena.outgoing = [arena.shard(sent, number) for number in numbers]
        self.fill_outgoing()

    @property
    def _updates_outgoing(self) -> bool:
        """Whether the update writes what is sent, beside the masters."""
        return self._bytes is None and bool(self.arena.outgoing) and not self._sends_masters

    @property
    def _sends_masters(self) -> bool:
        return bool(self.arena.outgoing) and self.arena.outgoing[0].data_ptr() == self.master.data_ptr()

    def fill_outgoing(self) -> None:
        """Copies the masters to what is sent."""
        if not self._sends_masters:
            for number, sent in enumerate(self.arena.outgoing):
                sent.copy_(self.arena.shard(self.master, number))

    def after_update(self) -> None:
        """Brings what is sent up to date where the update did not."""
        if self._bytes is not None:
            self._bytes.copy_(self.master)

    def read(self, name: str) -> Tensor:
        """A flat shard, not to be changed: of the masters, `PARAM`, or of one of `names`."""
        return self.master if name == PARAM else getattr(self, name)

    def write(self, name: str, values: Tensor) -> None:
        """Takes the values of a flat shard."""
        self.read(name).copy_(values)
        if name == PARAM:
            self.fill_outgoing()

    def shards(self) -> dict[str, Tensor]:
        """All flat shards."""
        return {name: self.read(name) for name in (PARAM, *self.names)}

    def pieces(self, gradients: Sequence[Tensor], first: int) -> list[Owned]:
        """What is updated, with the gradients of `arena.owned`; parameters are numbered from `first`."""
        found = []
        for piece, gradient in zip(self.arena.owned, gradients, strict=True):
            place = slice(piece.flat, piece.flat + piece.size)
            copy = None
            if self._updates_outgoing:
                copy = self.arena.outgoing[piece.bucket][piece.offset : piece.offset + piece.size]
            found.append(
                Owned(
                    first + piece.param,
                    self.arena.owners[piece.param],
                    self.master[place],
                    gradient,
                    self.exp_avg[place],
                    self.exp_avg_sq[place],
                    copy,
                )
            )
        return found
