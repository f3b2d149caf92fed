"""The state that this rank keeps for an arena's parameters, and its update by a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ....ops.multi_tensor import Lists, codecs, make_lists
from ....ops.multi_tensor.codecs import GROUP, Encoded, Encodings, NoisePlace
from ....ops.multi_tensor.flat import flat, with_strides_of
from ....ops.multi_tensor.rule import SLOTS
from ....ops.multi_tensor.tables import current_stream, upload
from ....ops.multi_tensor.torch_lists import TorchLists
from ....ops.multi_tensor.triton_lists import TritonLists
from ....optimizers._formats import CODECS
from .arena import Arena
from .layout import Piece, pick
from .weights import Weights, units_of

# A function of a parameter group's index and the lists of the group's tensors: weights, gradients, then state.
Apply = Callable[[Any, Lists], None]

# State that a format may encode, as in `FusedOptimizer._encodable`.
ENCODABLE = {"momentum_buffer": "signed", "exp_avg": "signed", "exp_avg_sq": "root"}

# The name in checkpoints of the parameters in the dtype of the state.
PARAM = "param"


def in_slots(
    weights: list[Tensor], gradients: Sequence[Tensor], state: Sequence[list[Tensor]]
) -> list[list[Tensor] | None]:
    """Return the tensor lists in the order of a rule's slots; gradients may have any dense layout."""
    return [weights, list(map(flat, gradients)), *state, *(None for _ in range(SLOTS - 2 - len(state)))]


class Gradients(Protocol):
    """The interface of `GradientSync` and `LambReducer` that an update uses."""

    def stay_in_place(self, arena: Arena) -> bool: ...
    def of_units(self, arena: Arena, units: Sequence[Piece]) -> list[Tensor]: ...


class _CachedLists(NamedTuple):
    """Lists for a rule, the stream and addresses that they were made for (`where`), and the gradients' dtype."""

    lists: Lists
    where: tuple[int, list[int]]
    dtype: torch.dtype

    @property
    def has_tensors(self) -> bool:
        """Return whether the lists still know all tensors: Triton lists keep addresses, torch lists may be emptied."""
        return isinstance(self.lists, TritonLists) or bool(self.lists.slots)


class Format(NamedTuple):
    """The format of an arena's state (docs/state_formats.md), and the number of each parameter, for random numbers."""

    name: str
    numbers: Sequence[int]


def format_of(optimizer: Any, arena: Arena) -> Format | None:
    """Return the format of an arena's state in an optimizer; None for plain numbers."""
    if optimizer.state_format == "float32":
        return None
    numbers = {param: number for group in optimizer.param_groups for number, param in enumerate(group["params"])}
    return Format(optimizer.state_format, [numbers[param] for param in arena.params])


class ArenaState:
    """Flat shards of an arena's moments, by name, and its weights.

    `units` are the pieces that a rule gets as one tensor each. The lists of tensors are reused from step to step, as
    long as only gradients move. With a `format` moments are encoded, in groups of 64 elements of the flat shard, which
    are groups of the parameters too: every piece starts at a multiple of 64 elements of its parameter.
    """

    def __init__(
        self,
        arena: Arena,
        names: Sequence[str],
        weights: Weights,
        units: Sequence[Piece] | None = None,
        format: Format | None = None,
    ) -> None:
        self.arena = arena
        self.weights = weights
        self._format = format
        self._codecs = {name: None if format is None else CODECS[format.name][ENCODABLE[name]] for name in names}
        plain = torch.bfloat16 if format is not None and format.name == "bfloat16" else arena.dtypes.state
        dtypes = {name: plain if codec is None else codecs.DTYPES[codec] for name, codec in self._codecs.items()}
        self.moments = {name: arena.new_state(dtype) for name, dtype in dtypes.items()}
        scaled = [name for name, codec in self._codecs.items() if codec is not None and codecs.has_scales(codec)]
        self._scales = {name: arena.new_state(torch.float32, GROUP) for name in scaled}
        if units is None and format is not None:  # stretches of several parameters would have one number
            units = arena.parts if arena.groups.is_one else arena.owned
        # The units of each parameter group, or of parts of a group.
        self.units: dict[Any, list[Piece]] = {}
        for unit in units_of(arena) if units is None else units:
            self.units.setdefault(arena.group_of[unit.param], []).append(unit)
        self._lists: dict[Any, _CachedLists] = {}
        # Gradients of the current step: kernels get addresses, which do not keep tensors alive.
        self._current_gradients: list[list[Tensor]] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the state, in the order of slots."""
        return tuple(self.moments)

    def connect(self) -> None:
        """Connect the weights with parameters that have become views of a buffer."""
        self.weights.connect()
        self._lists.clear()

    def apply(self, gradients: Gradients, function: Apply, noop: Tensor | None = None) -> None:
        """Call `function` for every parameter group; it must change nothing if `noop` is set."""
        self.weights.begin(skips=noop is not None)
        keeps = gradients.stay_in_place(self.arena) and self.weights.are_fixed
        for group, lists in self.lists(gradients).items():
            function(group, lists)
            if isinstance(lists, TorchLists) and not keeps:
                lists.slots = ()
        self._current_gradients.clear()
        self.weights.end()

    def lists(self, gradients: Gradients) -> dict[Any, Lists]:
        """Return the lists of each parameter group; call it between `weights.begin` and `weights.end`."""
        where = (current_stream(self.arena.device), self.weights.addresses())
        return {group: self._lists_of(group, units, gradients, where) for group, units in self.units.items()}

    def _lists_of(self, group: Any, units: list[Piece], gradients: Gradients, where: tuple[int, list[int]]) -> Lists:
        """Return the lists of a parameter group: unchanged, with other gradients, or new if weights have moved."""
        known = self._lists.get(group)
        if known is not None and known.where != where:
            known = None
        if known is not None and gradients.stay_in_place(self.arena) and known.has_tensors:
            return known.lists
        tensors = gradients.of_units(self.arena, units)
        self._current_gradients.append(tensors)
        if known is None or known.dtype != tensors[0].dtype:
            lists = make_lists(*self._slots(group, tensors))
            if self._format is not None:
                numbers = self._format.numbers
                places = [NoisePlace(numbers[unit.param], unit.start, unit.size, unit.size) for unit in units]
                lists.noise_places = upload(places, torch.int64, self.arena.device)
            self._lists[group] = _CachedLists(lists, where, tensors[0].dtype)
            return lists
        if isinstance(known.lists, TritonLists):
            known.lists.table.update_moving(list(map(Tensor.data_ptr, tensors)))
        else:
            known.lists.point_to(*self._slots(group, tensors))
        return known.lists

    def _slots(self, group: Any, gradients: list[Tensor]) -> tuple[list[list[Tensor] | None], Any, Encodings]:
        """Return the lists of a key of `units` by a rule's slots, the list for copies, and codecs of slots."""
        units = self.units[group]
        slots = in_slots(self.weights.slot(units), gradients, self._state_of(units))
        return slots, self.weights.copy(units), self._encodings(units)

    def _state_of(self, units: Sequence[Piece]) -> list[list[Tensor]]:
        """Return views of the units' state, in the order of slots."""
        return [pick(moment, units) for moment in self.moments.values()]

    def _encodings(self, units: Sequence[Piece]) -> Encodings:
        """Return the codec of every slot that has one, with the scales of the units."""
        found = {}
        for slot, (name, codec) in enumerate(self._codecs.items(), 2):
            scales = self._scales.get(name)
            if codec is not None:
                cut = [slice(unit.flat // GROUP, -(-(unit.flat + unit.size) // GROUP)) for unit in units]
                found[slot] = Encoded(codec, None if scales is None else [scales[each] for each in cut])
        return found

    def read(self, name: str) -> Tensor:
        """Return the flat shard of `PARAM` or of one of `names`, decoded; it must not be changed."""
        if name == PARAM:
            return self.weights.read()
        codec, moment = self._codecs[name], self.moments[name]
        if codec is not None:
            return codecs.decode(codec, moment, self._scales.get(name))
        return moment.to(self.arena.dtypes.state)

    def write(self, name: str, values: Tensor) -> None:
        """Set the values of a flat shard; parameters get theirs at the next synchronisation."""
        if name == PARAM:
            self.weights.write(values)
            return
        codec = self._codecs[name]
        if codec is not None:
            values, scales = codecs.encode(codec, values)
            if scales is not None:
                self._scales[name].copy_(scales)
        self.moments[name].copy_(values)

    def shards(self) -> dict[str, Tensor]:
        """Return all lasting flat shards, by their names in `StateBucket`."""
        return {**self.weights.stored(), **{f"{name}_shard": moment for name, moment in self.moments.items()}}


def start_from(state: Any, exact: Sequence[Tensor | None]) -> None:
    """Start new state from exact float32 weights instead of the parameters, which are these weights rounded.

    `exact` has None for parameters that were not rounded.
    """
    arena: Arena = state.arena
    if all(value is None for value in exact):
        return
    values = arena.new_state(torch.float32)
    for part in arena.parts:
        param, value = arena.params[part.param], exact[part.param]
        source = flat(with_strides_of(param, param.detach() if value is None else value))
        values[part.flat : part.flat + part.size].copy_(source[part.start : part.stop])
    state.write(PARAM, values)
