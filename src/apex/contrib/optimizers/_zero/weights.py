"""The weights that an update writes, and their copies to and from the parameters.

    InPlace     the parameters themselves: one process, and nothing to convert
    Stored      a lasting flat shard in the dtype of the state
    Gathered    a flat shard that exists only during an update
    Remainders  a float32 flat shard that exists only during an update, joined from bfloat16 parameters and a lasting
                flat shard of the 16 bits that they lack

Each class returns the tensors of a rule's slot 0 (`slot`) and the tensors that get a copy of it (`copy`), for the units
that the rule updates as one tensor: parameters with one process, else stretches of this rank's shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ....ops.multi_tensor.packed_floats import join_remainders, split_remainders
from ....optimizers._formats import check_format
from .arena import Arena, Dtypes, ParameterViews
from .layout import Piece, cuts, pick


def units_of(arena: Arena) -> list[Piece]:
    """Return the pieces that a rule updates as one tensor: parameters with one process, else stretches of shards.

    A stretch has parameters of one parameter group in one bucket, and the padding between them, which stays zero.
    """
    if arena.groups.is_one:
        return arena.parts
    units: list[Piece] = []
    for piece in arena.owned:
        first = units[-1] if units else None
        if first and (arena.group_of[first.param], first.bucket) == (
            arena.group_of[piece.param],
            piece.bucket,
        ):
            units[-1] = replace(first, stop=first.start + piece.offset + piece.size - first.offset)
        else:
            units.append(piece)
    return units


class Weights:
    """Base of the four kinds of weights listed at the top of this module."""

    # Whether `slot` returns tensors that keep their addresses from step to step.
    are_fixed = True

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        # Views of the parameters' parts that this rank owns.
        self._views = ParameterViews(arena, arena.parts)
        self._cuts = cuts([(part.flat, part.size) for part in arena.parts], arena.layout.shard_size)

    def connect(self) -> None:
        """Set the shards that `ParameterSync` sends; called again when parameters become views of a buffer."""
        self.arena.outgoing = []

    def begin(self, skips: bool) -> None:
        """Prepare `slot` for an update. If it may be skipped (`skips`), outgoing shards must be right without it."""

    def end(self) -> None:
        """Make the values that an update has written to `slot` the weights."""

    def slot(self, units: Sequence[Piece]) -> list[Tensor]:
        """Return the weights that an update writes, one tensor per unit."""
        raise NotImplementedError

    def copy(self, units: Sequence[Piece]) -> list[Tensor] | None:
        """Return the tensors that also receive the updated values, one per unit, or None."""
        return None

    def addresses(self) -> list[int]:
        """Return addresses that change whenever a tensor of `slot` or `copy` gets other memory."""
        return list(map(Tensor.data_ptr, self.arena.params))

    def read(self) -> Tensor:
        """Return the values in the dtype of the state, as a flat shard that must not be changed."""
        raise NotImplementedError

    def write(self, values: Tensor) -> None:
        """Set the values from a flat shard; the parameters get them at the next synchronisation."""
        raise NotImplementedError

    def stored(self) -> dict[str, Tensor]:
        """Return the flat shards that are kept between updates, by their names in `StateBucket`."""
        return {}

    def params_of(self, units: Sequence[Piece]) -> list[Tensor]:
        """Return 1-D views of the units' parameters; only with one process, when each unit is a parameter."""
        views = dict(zip((part.param for part in self.arena.parts), self._views(), strict=True))
        return [views[unit.param] for unit in units]

    def gather(self, values: Tensor) -> Tensor:
        """Copy this rank's part of the parameters to a flat shard, and return it."""
        if self.arena.parts:
            torch._foreach_copy_(list(values.split(self._cuts)[1::2]), self._views())
        return values

    def scatter(self, values: Tensor) -> None:
        """Copy a flat shard to the parameters."""
        if self.arena.parts:
            torch._foreach_copy_(self._views(), list(values.split(self._cuts)[1::2]))

    def make_outgoing(self) -> Tensor | list[Tensor]:
        """Set and return the outgoing shards, in the dtype that parameters are sent in.

        They hold the parameters' current values, which a skipped update sends. If the parameters are views of a
        buffer, the shards lie in it.
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
        """Return whether an update can write to the parameters directly, so that nothing is sent."""
        return self.arena.groups.is_one and _arrive_whole(self.arena)


class InPlace(Weights):
    """The parameters themselves."""

    def slot(self, units: Sequence[Piece]) -> list[Tensor]:
        return self.params_of(units)

    def read(self) -> Tensor:
        return self.gather(self.arena.new_shard(self.arena.dtypes.state))

    def write(self, values: Tensor) -> None:
        self.scatter(values)


class Stored(Weights):
    """A lasting flat shard in the dtype of the state."""

    _outgoing: Tensor | list[Tensor] | None = None

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self.values = self.gather(arena.new_state(arena.dtypes.state))

    def connect(self) -> None:
        arena = self.arena
        self._outgoing = None
        if self._writes_params:
            arena.outgoing = []
        elif arena.dtypes.state == arena.dtypes.parameters and arena.parameter_buffer is None and arena.host is None:
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
    """A flat shard that exists only during an update."""

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
    """A float32 flat shard that exists only during an update, and the lasting lower halves of its elements."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self.remainders = arena.new_state(torch.int16)

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
        """Return this rank's part of the bfloat16 parameters, as a flat shard."""
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
    """Return whether parameters are sent in their own dtype, with all bytes."""
    return arena.params[0].dtype == arena.dtypes.parameters and arena.sent_bytes is None


def weights_of(arena: Arena, store_params: bool, store_remainders: bool) -> Weights:
    """Return the weights of an arena for the given options."""
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
    """Raise an error for options of DistributedFusedAdam that exclude each other."""
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


def check_state_format(format: str, dtypes: Dtypes, amsgrad: bool, scaled: bool) -> None:
    """Raise an error for options of DistributedFusedAdam that `state_format` excludes."""
    check_format(format)
    if format == "float32":
        return
    if amsgrad or scaled:
        raise ValueError(f"{'amsgrad' if amsgrad else 'with_scaled_states'}=True needs state_format='float32'")
    if dtypes.state != torch.float32:
        raise ValueError(f"state_format={format!r} stores numbers of dtype=torch.float32, not {dtypes.state}")
