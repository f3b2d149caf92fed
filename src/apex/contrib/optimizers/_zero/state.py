"""The state of an arena's parameters that this rank keeps, and one pass of a rule over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ....ops.multi_tensor import Lists, make_lists
from ....ops.multi_tensor.flat import flat
from ....ops.multi_tensor.rule import SLOTS
from ....ops.multi_tensor.tables import current_stream
from ....ops.multi_tensor.torch_lists import TorchLists
from ....ops.multi_tensor.triton_lists import TritonLists
from .arena import Arena, laid_out_like
from .layout import Piece, pick
from .weights import Weights, units_of

# Gets the number of a parameter group and the lists of its tensors: weights, gradients, then state.
Apply = Callable[[int, Lists], None]

# What checkpoints call the parameters in the precision of the state.
PARAM = "param"


def in_slots(
    weights: list[Tensor], gradients: Sequence[Tensor], state: Sequence[list[Tensor]]
) -> list[list[Tensor] | None]:
    """The lists of a rule; gradients may be laid out in any dense way."""
    return [weights, list(map(flat, gradients)), *state, *(None for _ in range(SLOTS - 2 - len(state)))]


class Gradients(Protocol):
    """`GradientSync`, or the reducer of LAMB."""

    def stay_in_place(self, arena: Arena) -> bool: ...
    def of_units(self, arena: Arena, units: Sequence[Piece]) -> list[Tensor]: ...


class _CachedLists(NamedTuple):
    """Lists, what they depend on besides gradients (the stream, addresses), and the dtype of those."""

    lists: Lists
    where: tuple[int, list[int]]
    dtype: torch.dtype

    @property
    def has_tensors(self) -> bool:
        """Whether they know where all tensors are, and have not let go of them."""
        return isinstance(self.lists, TritonLists) or bool(self.lists.slots)


class ArenaState:
    """Flat shards in the dtype of the state, by name, and the weights.

    The lists of tensors that a rule walks over are kept from step to step, for as long as nothing moves but gradients.
    """

    def __init__(
        self, arena: Arena, names: Sequence[str], weights: Weights, units: Sequence[Piece] | None = None
    ) -> None:
        self.arena = arena
        self.names = tuple(names)
        self.weights = weights
        self.moments = {name: arena.new_shard(arena.dtypes.state) for name in names}
        # What rules walk over, by parameter group.
        self.units: dict[int, list[Piece]] = {}
        for unit in units_of(arena) if units is None else units:
            self.units.setdefault(arena.group_of[unit.param], []).append(unit)
        self._lists: dict[int, _CachedLists] = {}
        # Gradients of the step under way: kernels are given addresses, which keep nothing alive.
        self._held: list[list[Tensor]] = []

    def connect(self) -> None:
        """Called when parameters have become views of a buffer."""
        self.weights.connect()
        self._lists.clear()

    def apply(self, gradients: Gradients, function: Apply, noop: Tensor | None = None) -> None:
        """Calls `function` for every parameter group; it is to do nothing where `noop` is set."""
        self.weights.begin(skips=noop is not None)
        keeps = gradients.stay_in_place(self.arena) and self.weights.are_fixed
        for group, lists in self.lists(gradients).items():
            function(group, lists)
            if isinstance(lists, TorchLists) and not keeps:
                lists.slots = ()
        self._held.clear()
        self.weights.end()

    def lists(self, gradients: Gradients) -> dict[int, Lists]:
        """The lists of each parameter group; between `weights.begin` and `weights.end`."""
        where = (current_stream(self.arena.device), self.weights.addresses())
        return {group: self._lists_of(group, units, gradients, where) for group, units in self.units.items()}

    def _lists_of(self, group: int, units: list[Piece], gradients: Gradients, where: tuple[int, list[int]]) -> Lists:
        """The lists of a parameter group: as they are, with other gradients, or, where weights have moved, new ones."""
        known = self._lists.get(group)
        if known is not None and known.where != where:
            known = None
        if known is not None and gradients.stay_in_place(self.arena) and known.has_tensors:
            return known.lists
        given = gradients.of_units(self.arena, units)
        self._held.append(given)
        if known is None or known.dtype != given[0].dtype:
            lists = make_lists(*self._slots(units, given))
            self._lists[group] = _CachedLists(lists, where, given[0].dtype)
            return lists
        if isinstance(known.lists, TritonLists):
            known.lists.table.update_moving(list(map(Tensor.data_ptr, given)))
        else:
            known.lists.point_to(*self._slots(units, given))
        return known.lists

    def _slots(self, units: list[Piece], gradients: list[Tensor]) -> tuple[list[list[Tensor] | None], Any]:
        state = [pick(moment, units) for moment in self.moments.values()]
        return in_slots(self.weights.slot(units), gradients, state), self.weights.copy(units)

    def read(self, name: str) -> Tensor:
        """A flat shard, not to be changed: of `PARAM` or of one of `names`."""
        return self.weights.read() if name == PARAM else self.moments[name]

    def write(self, name: str, values: Tensor) -> None:
        """Takes the values of a flat shard; parameters have theirs after the next synchronisation."""
        if name == PARAM:
            self.weights.write(values)
        else:
            self.moments[name].copy_(values)

    def shards(self) -> dict[str, Tensor]:
        """All flat shards that stay from step to step, under the names that buckets have them under."""
        return {**self.weights.stored(), **{f"{name}_shard": moment for name, moment in self.moments.items()}}


def start_from(state: Any, exact: Sequence[Tensor | None]) -> None:
    """Has new state, of either kind, start from float32 weights that the arena's parameters are the rounding of."""
    arena: Arena = state.arena
    if all(value is None for value in exact):
        return
    values = arena.new_shard(torch.float32)
    for part in arena.parts:
        param, value = arena.params[part.param], exact[part.param]
        source = flat(laid_out_like(param.detach() if value is None else value, param))
        values[part.flat : part.flat + part.size].copy_(source[part.start : part.stop])
    state.write(PARAM, values)
