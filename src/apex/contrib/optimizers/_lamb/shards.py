"""The shards of DistributedFusedLAMB: the layout of parameters, their masters, and the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...._distributed.collectives import all_reduce
from ....ops.multi_tensor import rules
from ....optimizers._base import state_dtype
from .._zero.arena import ALIGNMENT, Arena, Dtypes
from .._zero.groups import Groups
from .._zero.layout import round_up
from .._zero.state import ArenaState
from .._zero.weights import Stored
from .reducer import LambReducer


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
        self.arena.outgoing = self.arena.shards(self._bytes)
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


class Update:
    """The update of all that this process owns of the parameters of `states`, which `groups` divide."""

    def __init__(self, states: Sequence[ArenaState], gradients: LambReducer, groups: Groups) -> None:
        self._states = states
        self._gradients = gradients
        self._groups = groups
        self._device = states[0].arena.device
        # For each state and parameter group, the numbers of the parameters that its pieces are of.
        self._params: list[tuple[int, list[int]]] = []
        self._count = 0
        for state in states:
            self._params += [
                (group, [self._count + unit.param for unit in units]) for group, units in state.units.items()
            ]
            self._count += len(state.arena.params)
        self._rows = [torch.tensor(each, dtype=torch.int64, device=self._device) for _, each in self._params]
        # By the groups whose steps are scaled: which lengths of pieces make up that of a parameter.
        self._tables: dict[tuple[int, ...], Tensor] = {}

    def __call__(
        self,
        hyper: Sequence[dict[str, Any]],
        flags: tuple[bool, ...],
        scaled: Sequence[bool],
        noop: Tensor,
        grad_scale: Tensor | None,
    ) -> None:
        """One step, unless `noop` is not 0, with the hyperparameters of each group and whether its steps are scaled."""
        batches = [(group, lists) for state in self._states for group, lists in state.lists(self._gradients).items()]
        squares = []
        for group, lists in batches:
            rule = rules.LAMB_MOMENTS if scaled[group] else rules.LAMB_UNSCALED
            found = lists.apply(rule, hyper[group], flags, noop=noop, grad_scale=grad_scale)
            if scaled[group]:
                assert found is not None
                squares.append(found[:, :2])
        if any(scaled):
            whole = self._whole(squares, tuple(index for index, wanted in enumerate(scaled) if wanted))
            for (group, lists), rows in zip(batches, self._rows, strict=True):
                if scaled[group]:
                    lists.apply(rules.LAMB_STEP, hyper[group], flags, noop=noop, whole=whole[rows])
        for state in self._states:
            state.weights.end()

    def _whole(self, squares: list[Tensor], scaled: tuple[int, ...]) -> Tensor:
        """Squared lengths of parameters and of their steps, float32 [parameters, 2], from those of pieces."""
        # Added up through a table, not with index_add, whose order of additions is another one in every run.
        nothing = torch.zeros(1, 2, dtype=torch.float32, device=self._device)
        each = torch.cat([*squares, nothing])
        whole = each[self._table(scaled)].sum(1)
        if self._groups.ranks > 1:
            all_reduce(whole, self._groups.distributed, "measuring parameters and their steps").wait()
        return whole

    def _table(self, scaled: tuple[int, ...]) -> Tensor:
        """For each parameter the rows of its pieces, int64 [parameters, at least 1]; the row after all is of none."""
        table = self._tables.get(scaled)
        if table is None:
            rows: list[list[int]] = [[] for _ in range(self._count)]
            count = 0
            for group, params in self._params:
                for param in params if group in scaled else ():
                    rows[param].append(count)
                    count += 1
            width = max([1, *map(len, rows)])
            padded = [number for row in rows for number in (*row, *[count] * (width - len(row)))]
            table = torch.tensor(padded, dtype=torch.int64, device=self._device).reshape(self._count, width)
            self._tables[scaled] = table
        return table
