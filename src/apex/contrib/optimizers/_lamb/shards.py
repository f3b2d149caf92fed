"""How DistributedFusedLAMB lays parameters out, and what it sends of their masters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....optimizers._base import state_dtype
from .._zero.arena import ALIGNMENT, Arena, Dtypes
from .._zero.groups import Groups
from .._zero.layout import round_up
from .._zero.state import ArenaState
from .._zero.weights import Stored


def make_arena(params: Sequence[Tensor], owners: Sequence[int], groups: Groups, buckets: int) -> Arena:
    """An arena of parameters of one dtype and device, in about `buckets` buckets."""
    dtype = params[0].dtype
    alignment = max(1, ALIGNMENT // dtype.itemsize)
    elements = sum(round_up(param.numel(), alignment) for param in params)
    size = round_up(-(-elements // buckets), groups.ranks * alignment)
    return Arena(params, owners, Dtypes(state_dtype(params[0]), dtype, dtype), groups, size * dtype.itemsize)


class Masters(Stored):
    """A flat shard of masters, which are always sent; with `in_bytes` as 8-bit floats."""

    def __init__(self, arena: Arena, in_bytes: bool) -> None:
        super().__init__(arena)
        self._bytes = arena.new_shard(torch.float8_e5m2) if in_bytes else None
        self.connect()

    def connect(self) -> None:
        if self._bytes is None:
            super().connect()
            return
        # Parameters may be views of a buffer, but what arrives has another dtype than it.
        self.arena.parameter_buffer = None
        self._outgoing = None
        numbers = range(len(self.arena.layout.bucket_sizes))
        self.arena.outgoing = [self.arena.shard(self._bytes, number) for number in numbers]
        self.end()

    @property
    def _writes_params(self) -> bool:
        return False

    def end(self) -> None:
        if self._bytes is not None:
            self._bytes.copy_(self.values)

    def addresses(self) -> list[int]:
        return []  # masters stay where they are, and so does what is sent


def make_state(arena: Arena, in_bytes: bool) -> ArenaState:
    """Masters and moments of an arena; a unit is a piece of one parameter, whose length LAMB measures."""
    return ArenaState(arena, ("exp_avg", "exp_avg_sq"), Masters(arena, in_bytes), arena.owned)
