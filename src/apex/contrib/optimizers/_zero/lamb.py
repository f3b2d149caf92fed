"""The gradients, the master weights and the update of DistributedFusedLAMB.

Gradients stay in `param.grad`. A round copies every gradient once to a flat buffer and sends every bucket of the buffer
once. A gradient that is missing when the round ends counts as zeros. With `overlap` the first round counts how often
each gradient is added to, and notes when each bucket becomes complete. Later rounds send buckets in the order of
process 0 while the backward pass goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...._distributed.collectives import all_reduce, can_multiply_while_reducing
from ...._distributed.reducer import Sent
from ....ops.multi_tensor import l2norm, rules, scale, zero
from ....ops.multi_tensor.flat import FlatBuffer, with_strides_of
from ....optimizers._base import state_dtype
from .arena import ALIGNMENT, Arena, Dtypes
from .gradients import ShardReducer, check_dense
from .groups import Groups
from .layout import Piece, pick, round_up
from .norms import norm_over_ranks
from .state import ArenaState
from .weights import Stored


class LambReducer(ShardReducer):
    """The mean of all processes' gradients.

    With `full` every process gets the whole mean. Otherwise it gets its shards of the mean of its machine, which are
    then averaged over machines. `norm` is the norm of the mean, float32 [1].
    """

    def __init__(self, groups: Groups, *, full: bool, overlap: bool) -> None:
        super().__init__(groups, average=True)
        self.norm: Tensor | None = None
        # Whether `complete` has been called since the last gradient arrived.
        self.is_complete = False
        # A process that gets the whole mean receives it in its gradient buffer, in place.
        self._gets_all = full or self._gets_all
        self._overlap = overlap and not self.groups.is_one
        # How often a gradient is added to in a round, if more than once.
        self._expected: Counter[tuple[int, int]] = Counter()
        # For each bucket, views of its pieces in the buffer, made once: making them takes longer than copying.
        self._pieces: list[Sequence[Tensor]] = []

    def add(self, arena: Arena) -> None:
        """Add an arena and its gradient buffer, before the first round."""
        super().add(arena)
        self._order.reverse()  # backward passes produce the last gradients first
        arena.gradient_buffer = arena.new_buffer(arena.dtypes.gradients)
        for number in range(len(arena.layout.bucket_sizes)):
            self._pieces.append(arena.layout.cut(arena.bucket(arena.gradient_buffer.values, number), number))

    def _start_round(self) -> None:
        super()._start_round()
        # Whether `zero_grad` has cleared the gradients: later gradients then belong to the next round.
        self._cleared = False
        # How often each gradient has been added to in this round, by (arena index, index).
        self._arrivals: Counter[tuple[int, int]] = Counter()
        # Whether all gradients were copied to the buffer already, and the factor that sending multiplies them by.
        self._is_filled = False
        self._factor: Tensor | None = None
        for arena in self.arenas:
            arena.gradients = [None] * len(arena.params)

    def arrived(self, arena_index: int, index: int, may_send: bool = True) -> None:
        """Note that a backward pass has added to a gradient; send buckets that are complete, if `may_send`."""
        if self._cleared:
            self.finish()
            self._start_round()
        arena, buckets = self.arenas[arena_index], self._buckets_of(arena_index, index)
        param = arena.params[index]
        assert param.grad is not None
        check_dense(param.grad)
        if not self._sent.isdisjoint(buckets):
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(param.shape)} changed after it had been sent to other "
                "processes: it is added to more often than in the first step. Call set_is_accumulation_step(True) "
                "before all backward passes of a step but the last, or use overlap_reductions=False"
            )
        arena.gradients[index] = with_strides_of(param, param.grad)
        self._arrivals[arena_index, index] += 1
        if self._arrivals[arena_index, index] >= self._expected.get((arena_index, index), 1):
            self._note(index, buckets)
        if self._overlap and self._has_order and may_send:
            self.flush_ready()

    def hold(self, keep_tensors: bool) -> None:
        """Keep the gradients that have arrived, because `zero_grad` is about to clear them.

        Buckets that other processes may wait for are sent. `keep_tensors`: the gradients' memory will be overwritten.
        """
        if not self._arrivals:
            return
        if self._overlap and self._has_order:
            self._send_rest()
        elif keep_tensors:
            for arena in self.arenas:
                arena.gradients = [None if g is None else g.clone() for g in arena.gradients]
        self._cleared = True

    @torch.no_grad()
    def complete(self) -> None:
        """Send the remaining buckets, wait for all, and compute the norm of the mean."""
        self._take_remaining()
        if self._overlap and not self._has_order:
            self._agree()
            self._expected = self._arrivals
        self._finish_round()
        means = map(self._mean, self.arenas)
        shards = [shard for mean in means for shard in ([mean] if isinstance(mean, Tensor) else mean)]
        self.norm = norm_over_ranks(shards, self.groups, self.arenas[0].device).reshape(1)

    @torch.no_grad()
    def complete_clipped(self, limit: Tensor | float | None, *, fused_norm: bool, fused_scale: bool) -> None:
        """Complete a round after clipping this process's gradients to the norm `limit`; `norm` is the unclipped one."""
        self._take_remaining()
        self.norm = self._copy_and_measure(fused_norm)
        factor = None
        if limit is not None:
            # Non-finite gradients are not scaled, so that other processes see them.
            factor = torch.where(torch.isfinite(self.norm), torch.clamp(limit / self.norm, max=1.0), 1.0)
            if not fused_scale or self.groups.is_one or not can_multiply_while_reducing():
                buffers = [self._flat(arena).values for arena in self.arenas]
                scale(buffers, buffers, factor)
                factor = None
        self._is_filled, self._factor = True, factor
        self._finish_round()

    def _finish_round(self) -> None:
        self._send_rest()
        self.finish()
        self._start_round()
        self.is_complete = True

    def _take_remaining(self) -> None:
        """Take gradients that no backward pass of this round has added to, unless they were cleared since."""
        for arena in self.arenas if not self._cleared else ():
            for index, param in enumerate(arena.params):
                if arena.gradients[index] is None and param.grad is not None:
                    arena.gradients[index] = with_strides_of(param, param.grad)

    def _copy_and_measure(self, fused: bool) -> Tensor:
        """Copy all gradients to the buffers and return their norm, computed in the same pass if `fused`."""
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        missing: list[Tensor] = []
        for arena in self.arenas:
            for gradient, view in zip(arena.gradients, self._flat(arena).views, strict=True):
                if gradient is None:
                    missing.append(view)
                else:
                    sources.append(gradient)
                    targets.append(view)
        if missing:
            zero(missing)
        if fused and sources:
            return l2norm(sources, outputs=targets, of_inputs=True)[0]
        if sources:
            torch._foreach_copy_(targets, sources)
        return l2norm([self._flat(arena).values for arena in self.arenas])[0]

    @torch.no_grad()
    def _start(self, bucket: int) -> Sent:
        arena_index, number = self._buckets[bucket]
        arena = self.arenas[arena_index]
        if not self._is_filled and (missing := arena.copy_gradients(number, self._pieces[bucket])):
            torch._foreach_zero_(missing)
        values = arena.bucket(self._flat(arena).values, number)
        shard = values if self._gets_all else arena.shard(self.shards(arena), number)
        return Sent(bucket, self._reduce(bucket, values, shard, self._factor))

    def _receive(self, sent: Sent) -> None:
        """Do nothing: the collective has written the mean to the memory that `_mean` returns."""

    def stay_in_place(self, arena: Arena) -> bool:
        """Return True: `of_units` returns views of the same buffer at every step."""
        return True

    def of_units(self, arena: Arena, units: Sequence[Piece]) -> list[Tensor]:
        """Return the mean's elements of pieces of this rank's shards."""
        return pick(self._mean(arena), units)

    def _mean(self, arena: Arena) -> Tensor | list[Tensor]:
        """Return this rank's flat shard of the mean, or its shard of each bucket; zeros between parameters."""
        return arena.shards(self._flat(arena)) if self._gets_all else self.shards(arena)

    def _flat(self, arena: Arena) -> FlatBuffer:
        assert arena.gradient_buffer is not None
        return arena.gradient_buffer


def make_arena(params: Sequence[Tensor], group_of: Sequence[int], groups: Groups, buckets: int) -> Arena:
    """Return an arena of parameters of one dtype, in about `buckets` buckets."""
    dtype = params[0].dtype
    alignment = max(1, ALIGNMENT // dtype.itemsize)
    elements = sum(round_up(param.numel(), alignment) for param in params)
    size = round_up(-(-elements // buckets), groups.ranks * alignment)
    return Arena(params, group_of, Dtypes(state_dtype(params[0]), dtype, dtype), groups, size * dtype.itemsize)


class Masters(Stored):
    """A flat shard of master weights, which are sent after every update; with `in_bytes` as 8-bit floats."""

    def __init__(self, arena: Arena, in_bytes: bool) -> None:
        super().__init__(arena)
        self._bytes = arena.new_shard(torch.float8_e5m2) if in_bytes else None
        self.connect()

    def connect(self) -> None:
        if self._bytes is None:
            super().connect()
            return
        # A buffer that the parameters are views of cannot receive 8-bit floats: it has the parameters' dtype.
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
        return []  # neither masters nor the tensors that are sent ever move


class Update:
    """LAMB's update of this process's shards; a parameter's norm is computed over the ranks that divide it."""

    def __init__(self, states: Sequence[ArenaState], gradients: LambReducer, groups: Groups) -> None:
        self._states = states
        self._gradients = gradients
        self._groups = groups
        self._device = states[0].arena.device
        # For each state and parameter group: the group, and for each of its pieces the index of its parameter.
        self._params: list[tuple[int, list[int]]] = []
        self._count = 0
        for state in states:
            self._params += [
                (group, [self._count + unit.param for unit in units]) for group, units in state.units.items()
            ]
            self._count += len(state.arena.params)
        self._rows = [torch.tensor(indices, dtype=torch.int64, device=self._device) for _, indices in self._params]
        # By the groups with a trust ratio: for each parameter, the rows of its pieces.
        self._tables: dict[tuple[int, ...], Tensor] = {}

    def __call__(
        self,
        hyper: Sequence[dict[str, Any]],
        flags: tuple[bool, ...],
        scaled: Sequence[bool],
        noop: Tensor,
        grad_scale: Tensor | None,
    ) -> None:
        """Perform a step unless `noop` is set.

        `hyper` has the hyperparameters of each group, `scaled` whether its steps are multiplied by trust ratios.
        """
        batches = [(group, lists) for state in self._states for group, lists in state.lists(self._gradients).items()]
        squares = []
        for group, lists in batches:
            rule = rules.LAMB_MOMENTS if scaled[group] else rules.LAMB_UNSCALED
            squared_norms = lists.apply(rule, hyper[group], flags, noop=noop, grad_scale=grad_scale)
            if scaled[group]:
                assert squared_norms is not None
                squares.append(squared_norms[:, :2])
        if any(scaled):
            whole = self._whole(squares, tuple(index for index, wanted in enumerate(scaled) if wanted))
            for (group, lists), rows in zip(batches, self._rows, strict=True):
                if scaled[group]:
                    lists.apply(rules.LAMB_STEP, hyper[group], flags, noop=noop, whole=whole[rows])
        for state in self._states:
            state.weights.end()

    def _whole(self, squares: list[Tensor], scaled: tuple[int, ...]) -> Tensor:
        """Return the squared norms of whole parameters and of their steps, float32 [parameters, 2].

        `squares` has the squared norms of pieces.
        """
        # Added up through a table, because index_add adds in a different order in every run.
        zeros = torch.zeros(1, 2, dtype=torch.float32, device=self._device)
        whole = torch.cat([*squares, zeros])[self._table(scaled)].sum(1)
        if self._groups.ranks > 1:
            all_reduce(whole, self._groups.distributed, "measuring parameters and their steps").wait()
        return whole

    def _table(self, scaled: tuple[int, ...]) -> Tensor:
        """Return, for each parameter, the indices of its pieces' rows in `squares`, int64 [parameters, most pieces].

        Short rows are padded with the index of the row of zeros behind `squares`.
        """
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
