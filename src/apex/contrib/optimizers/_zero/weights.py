"""Where this rank's part of the parameters is while it is updated, and how it gets there and back.

    InPlace     the parameters themselves: one process, and nothing to convert
    Stored      a flat shard in the precision of the state, which stays
    Gathered    a flat shard that exists during an update only
    Remainders  the same in float32, joined from bfloat16 parameters and a flat shard of the 16 bits that they lack

All of them give the tensors of slot 0 of a rule (`slot`) and those that get a copy of it (`copy`), for the units that
the rule walks over: of one process the parameters, else the runs of its shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ....ops.multi_tensor.packed_floats import join_remainders, split_remainders
from .arena import Arena, Dtypes, ParameterViews
from .layout import Piece, cuts, pick


def units_of(arena: Arena) -> list[Piece]:
    """What a rule takes as one tensor: of one process the parameters, else stretches of the shards of buckets.

    A stretch has parameters of one parameter group, with the padding between them, which is zero and stays so.
    """
    if arena.groups.is_one:
        return arena.parts
    found: list[Piece] = []
    for piece in arena.owned:
        first = found[-1] if found else None
        if first and (arena.group_of[first.param], first.bucket) == (
            arena.group_of[piece.param],
            piece.bucket,
        ):
            found[-1] = replace(first, stop=first.start + piece.offset + piece.size - first.offset)
        else:
            found.append(piece)
    return found


class Weights:
    """Base class of the ways listed at the top of this module."""

    # Whether `slot` gives tensors that stay from step to step, at their addresses.
    are_fixed = True

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        # The parts of parameters that this rank owns, in the parameters themselves.
        self._views = ParameterViews(arena, arena.parts)
        self._cuts = cuts([(part.flat, part.size) for part in arena.parts], arena.layout.shard_size)

    def connect(self) -> None:
        """Says to `ParameterSync` where updated parameters are; again when parameters became views of a buffer."""
        self.arena.outgoing = []

    def begin(self, skips: bool) -> None:
        """Makes `slot` ready to be read; if it `skips`, what is sent must be right without the update too."""

    def end(self) -> None:
        """Takes what an update has written."""

    def slot(self, units: Sequence[Piece]) -> list[Tensor]:
        """The tensors that an update writes."""
        raise NotImplementedError

    def copy(self, units: Sequence[Piece]) -> list[Tensor] | None:
        """The tensors that get a copy of what an update writes."""
        return None

    def addresses(self) -> list[int]:
        """The addresses of `slot` and `copy`."""
        return list(map(Tensor.data_ptr, self.arena.params))

    def read(self) -> Tensor:
        """The values, in the dtype of the state, as a flat shard that must not be changed."""
        raise NotImplementedError

    def write(self, values: Tensor) -> None:
        """Other values, given as a flat shard; the parameters have them after the next synchronisation."""
        raise NotImplementedError

    def stored(self) -> dict[str, Tensor]:
        """Flat shards that stay from step to step, by the name that buckets have them under."""
        return {}

    def params_of(self, units: Sequence[Piece]) -> list[Tensor]:
        """The parameters of units as vectors; for one process, of which each unit is a parameter."""
        views = dict(zip((part.param for part in self.arena.parts), self._views(), strict=True))
        return [views[unit.param] for unit in units]

    def gather(self, values: Tensor) -> Tensor:
        """Fills a flat shard with what this rank owns of the parameters."""
        if self.arena.parts:
            torch._foreach_copy_(list(values.split(self._cuts)[1::2]), self._views())
        return values

    def scatter(self, values: Tensor) -> None:
        """Gives the parameters the values of a flat shard."""
        if self.arena.parts:
            torch._foreach_copy_(self._views(), list(values.split(self._cuts)[1::2]))

    def make_outgoing(self) -> Tensor | list[Tensor]:
        """Shards in the dtype that parameters travel in, with what these are now: a skipped update sends that.

        In the parameters' buffer, where there is one.
        """
        arena = self.arena
        if arena.parameter_buffer is None:
            storage: Tensor | list[Tensor] = self.gather(arena.new_shard(arena.dtypes.parameters))
        elif arena.groups.ranks == 1:
            storage = arena.parameter_buffer.values
        else:
            storage = arena.shards(arena.parameter_buffer)
        arena.outgoing = arena.shards(storage) if isinstance(storage, Tensor) else storage
        return storage

    @property
    def _writes_params(self) -> bool:
        """Whether an update can write to the parameters themselves, so that nothing needs to be sent."""
        return self.arena.groups.is_one and _arrive_whole(self.arena)


class InPlace(Weights):
    def slot(self, units: Sequence[Piece]) -> list[Tensor]:
        return self.params_of(units)

    def read(self) -> Tensor:
        return self.gather(self.arena.new_shard(self.arena.dtypes.state))

    def write(self, values: Tensor) -> None:
        self.scatter(values)


class Stored(Weights):
    _outgoing: Tensor | list[Tensor] | None = None

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self.values = self.gather(arena.new_shard(arena.dtypes.state))

    def connect(self) -> None:
        arena = self.arena
        self._outgoing = None
        if self._writes_params:
            arena.outgoing = []
        elif arena.dtypes.state == arena.dtypes.parameters and arena.parameter_buffer is None:
            arena.outgoing = arena.shards(self.values)
        else:
            self._outgoing = self.make_outgoing()

    def slot(self, units: Sequence[Piece]) -> list[Tensor]:
        return pick(self.values, units)

    def copy(self, units: Sequence[Piece]) -> list[Tensor] | None:
        if self._writes_params:
            return self.params_of(units)
        return None if self._outgoing is None else pick(self._outgoing, units)

    def read(self) -> Tensor:
        return self.values

    def write(self, values: Tensor) -> None:
        self.values.copy_(values)
        for shard, value in zip(self.arena.outgoing, self.arena.shards(self.values), strict=False):
            if shard.data_ptr() != value.data_ptr():
                shard.copy_(value)
        if self._writes_params:
            self.scatter(self.values)

    def stored(self) -> dict[str, Tensor]:
        return {"params_shard": self.values}


class Gathered(Weights):
    are_fixed = False

    def connect(self) -> None:
        self._outgoing = self.make_outgoing()
        self._values: Tensor | None = None

    def begin(self, skips: bool) -> None:
        self._values = self.gather(self.arena.new_shard(self.arena.dtypes.state))
        if skips and isinstance(self._outgoing, Tensor) and self.arena.parameter_buffer is None:
            self.gather(self._outgoing)

    def end(self) -> None:
        self._values = None

    def slot(self, units: Sequence[Piece]) -> list[Tensor]:
        assert self._values is not None
        return pick(self._values, units)

    def copy(self, units: Sequence[Piece]) -> list[Tensor] | None:
        return pick(self._outgoing, units)

    def addresses(self) -> list[int]:
        assert self._values is not None
        return [self._values.data_ptr()]

    def read(self) -> Tensor:
        return self.gather(self.arena.new_shard(self.arena.dtypes.state))

    def write(self, values: Tensor) -> None:
        for shard, value in zip(self.arena.outgoing, self.arena.shards(values), strict=True):
            shard.copy_(value)


class Remainders(Gathered):
    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self.remainders = arena.new_shard(torch.int16)

    def begin(self, skips: bool) -> None:
        self._values = self.read()

    def end(self) -> None:
        assert self._values is not None
        self.write(self._values)
        self._values = None

    def copy(self, units: Sequence[Piece]) -> list[Tensor] | None:
        return None

    def read(self) -> Tensor:
        return join_remainders(self._upper_halves(), self.remainders)

    def _upper_halves(self) -> Tensor:
        """This rank's part of the parameters, as a flat shard."""
        if not isinstance(self._outgoing, Tensor):
            return torch.cat(self._outgoing)
        return self._outgoing if self.arena.parameter_buffer is not None else self.gather(self._outgoing)

    def write(self, values: Tensor) -> None:
        parts = zip(self.arena.shards(values), self.arena.outgoing, self.arena.shards(self.remainders), strict=True)
        for part, upper, lower in parts:
            split_remainders(part, upper, lower)

    def stored(self) -> dict[str, Tensor]:
        return {"param_remainders_shard": self.remainders}


def _arrive_whole(arena: Arena) -> bool:
    """Whether parameters travel as they are."""
    return arena.params[0].dtype == arena.dtypes.parameters and arena.sent_bytes is None


def weights_of(arena: Arena, store_params: bool, store_remainders: bool) -> Weights:
    """How the parameters of an arena are kept."""
    dtype, whole = arena.params[0].dtype, _arrive_whole(arena)
    weights: Weights
    if store_remainders and arena.dtypes.state == torch.float32 and whole and dtype == torch.bfloat16:
        weights = Remainders(arena)
    elif arena.groups.is_one and whole and (not store_params or dtype == arena.dtypes.state):
        weights = InPlace(arena)
    else:
        weights = Stored(arena) if store_params or store_remainders else Gathered(arena)
    weights.connect()
    return weights


def check_storage(dtypes: Dtypes, stores: bool, remainders: bool, scaled: bool, capturable: bool) -> None:
    """Raises for options of DistributedFusedAdam that do not go together."""
    if remainders and stores:
        raise ValueError("store_param_remainders=True takes the place of store_params, which must be False")
    if remainders and (dtypes.state, dtypes.parameters) != (torch.float32, torch.bfloat16):
        raise ValueError(
            "store_param_remainders is for bfloat16 parameters with float32 state: dtype must be float32 and "
            f"param_sync_dtype bfloat16, not {dtypes.state} and {dtypes.parameters}"
        )
    if scaled and (not stores or dtypes.state == torch.float32):
        raise ValueError(
            f"with_scaled_states needs store_params=True and dtype float16 or bfloat16, not store_params={stores} and "
            f"dtype={dtypes.state}"
        )
    if capturable and (scaled or remainders):
        raise ValueError("capturable works with neither with_scaled_states nor store_param_remainders")
