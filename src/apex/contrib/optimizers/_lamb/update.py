"""LAMB of the shards of this process: lengths of whole parameters are put together from those of their pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...._distributed.collectives import all_reduce
from ....ops.multi_tensor import rules
from .._zero.groups import Groups
from .lists import FixedLists


@dataclass(frozen=True)
class Owned:
    """A piece of parameter `param`, a member of parameter group `group`; `copy` gets what is updated, if given."""

    param: int
    group: int
    master: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    copy: Tensor | None

    @property
    def kind(self) -> tuple[Any, ...]:
        """Pieces of one kind are updated in one pass."""
        return self.group, self.master.dtype, self.gradient.dtype, None if self.copy is None else self.copy.dtype


@dataclass(frozen=True)
class _Batch:
    """Pieces of one kind, and the rows of their parameters in a table of lengths."""

    group: int
    params: tuple[int, ...]
    rows: Tensor
    lists: FixedLists


class Update:
    """The update of all pieces that this process owns, of `params` parameters that `groups` divide."""

    def __init__(self, pieces: Sequence[Owned], params: int, device: torch.device, groups: Groups) -> None:
        self._device = device
        self._params = params
        self._groups = groups
        kinds: dict[tuple[Any, ...], list[Owned]] = {}
        for piece in pieces:
            kinds.setdefault(piece.kind, []).append(piece)
        self._batches = [_batch(members) for members in kinds.values()]
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
        squares = []
        for batch in self._batches:
            numbers = hyper[batch.group]
            if not scaled[batch.group]:
                batch.lists.here().apply(rules.LAMB_UNSCALED, numbers, flags, noop=noop, grad_scale=grad_scale)
                continue
            found = batch.lists.here().apply(rules.LAMB_MOMENTS, numbers, flags, noop=noop, grad_scale=grad_scale)
            assert found is not None
            squares.append(found[:, :2])
        if not any(scaled):
            return
        whole = self._whole(squares, tuple(index for index, wanted in enumerate(scaled) if wanted))
        for batch in self._batches:
            if scaled[batch.group]:
                batch.lists.here().apply(rules.LAMB_STEP, hyper[batch.group], flags, noop=noop, whole=whole[batch.rows])

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
            rows: list[list[int]] = [[] for _ in range(self._params)]
            count = 0
            for batch in self._batches:
                if batch.group in scaled:
                    for param in batch.params:
                        rows[param].append(count)
                        count += 1
            width = max([1, *map(len, rows)])
            padded = [number for row in rows for number in (*row, *[count] * (width - len(row)))]
            table = torch.tensor(padded, dtype=torch.int64, device=self._device).reshape(self._params, width)
            self._tables[scaled] = table
        return table


def _batch(members: list[Owned]) -> _Batch:
    slots: list[list[Tensor] | None] = [
        [piece.master for piece in members],
        [piece.gradient for piece in members],
        [piece.exp_avg for piece in members],
        [piece.exp_avg_sq for piece in members],
    ]
    copies = [piece.copy for piece in members if piece.copy is not None]
    params = tuple(piece.param for piece in members)
    rows = torch.tensor(params, dtype=torch.int64, device=members[0].master.device)
    return _Batch(members[0].group, params, rows, FixedLists(slots, copies or None))
