"""What DistributedFusedLAMB has beside: gradients that stay with their parameters, masters, the update.

A round copies every gradient once to its place in a flat buffer and sends every bucket of it once. With `overlap` the
first round notes how often each gradient is added to, and the order in which buckets become complete; from the second
on they are sent in this order, that of process 0 everywhere, while the backward pass goes on. What has no gradient when
a round ends counts as zero.
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
from ....ops.multi_tensor.flat import FlatBuffer
from ....optimizers._base import state_dtype
from .arena import ALIGNMENT, Arena, Dtypes, laid_out_like
from .gradients import ShardReducer, check_dense
from .groups import Groups
from .layout import Piece, pick, round_up
from .norms import norm_over_ranks
from .state import ArenaState
from .weights import Stored


class LambReducer(ShardReducer):
    """The gradients of `arenas`.

    With `full` every process gets the whole mean, else its shards, which then are averaged over machines. `norm` is
    float32 [1], that of the mean.
    """

    def __init__(self, arenas: Sequence[Arena], groups: Groups, *, full: bool, overlap: bool) -> None:
        super().__init__(groups, average=True)
        self.norm: Tensor | None = None
        # Whether `complete` has been called since the last gradient arrived.
        self.is_complete = False
        # The mean stays where the gradients were, in the buffer of all, where a process gets all of it.
        self._gets_all = full or self._gets_all
        self._overlap = overlap and not self.groups.is_one
        # Whether processes have agreed on an order, in which buckets can be sent while a backward pass goes on.
        self._has_order = False
        # How often a gradient is added to in a round, if more than once.
        self._expected: Counter[tuple[int, int]] = Counter()
        # What is sent next, of gradients that are copied and measured already: their factor, if any.
        self._is_filled = False
        self._factor: Tensor | None = None
        # Of each bucket the places of its pieces: views that are made once, which takes longer than copying.
        self._pieces: list[Sequence[Tensor]] = []
        for arena in arenas:
            self._add(arena)
            self.make_buffer(arena)
            for number in range(len(arena.layout.bucket_sizes)):
                self._pieces.append(arena.layout.cut(arena.bucket(self._flat(arena).values, number), number))
        # From the last to the first, as gradients arrive.
        self._order.reverse()
        self._places = {
            id(param): (place, index)
            for place, arena in enumerate(self.arenas)
            for index, param in enumerate(arena.params)
        }

    def _start_round(self) -> None:
        super()._start_round()
        # Whether gradients have been cleared, so that the next ones belong to another round.
        self._cleared = False
        # How often gradients have been added to.
        self._arrivals: Counter[tuple[int, int]] = Counter()
        self._is_filled = False
        self._factor = None
        for arena in self.arenas:
            arena.gradients = [None] * len(arena.params)

    # A backward pass --------------------------------------------------------------------------------------------------

    def arrived(self, param: Tensor, may_send: bool = True) -> None:
        """A backward pass has added to a parameter's gradient for the last time in this round."""
        place = self._places.get(id(param))
        if place is None:
            return
        if self._cleared:
            self.finish()
            self._start_round()
        arena, buckets = self.arenas[place[0]], self._buckets_of(*place)
        assert param.grad is not None
        check_dense(param.grad)
        if not self._sent.isdisjoint(buckets):
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(param.shape)} changed after it had been sent to other "
                "processes: it is added to more often than in the first step. Call set_is_accumulation_step(True) "
                "before all backward passes of a step but the last, or use overlap_reductions=False"
            )
        arena.gradients[place[1]] = laid_out_like(param.grad, param)
        self._arrivals[place] += 1
        if self._arrivals[place] >= self._expected.get(place, 1):
            self._note(place[1], buckets)
        if self._overlap and self._has_order and may_send:
            self.flush_ready()

    def hold(self, keep_tensors: bool) -> None:
        """Gradients are about to be cleared: what has arrived is kept, and sent if others may wait for it.

        `keep_tensors` says that the tensors will be written to.
        """
        if not self._arrivals:
            return
        if self._overlap and self._has_order:
            self._send_rest()
        elif keep_tensors:
            for arena in self.arenas:
                arena.gradients = [None if g is None else g.clone() for g in arena.gradients]
        self._cleared = True

    # The end of a round -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def complete(self) -> None:
        """Sends what has not been sent, waits, and measures the norm of the mean."""
        self._take_the_rest()
        if self._overlap and not self._has_order:
            self._agree_on_order(self.arenas[0].device, self.groups.process_group, self.groups.root)
            self._has_order = True
            self._expected = self._arrivals
        self._finish_round()
        means = map(self._mean, self.arenas)
        shards = [shard for mean in means for shard in ([mean] if isinstance(mean, Tensor) else mean)]
        self.norm = norm_over_ranks(shards, self.groups, self.arenas[0].device).reshape(1)

    @torch.no_grad()
    def complete_clipped(self, limit: Tensor | float | None, *, fused_norm: bool, fused_scale: bool) -> None:
        """`complete` for gradients that every process first clips to the norm `limit`; `norm` is that before."""
        self._take_the_rest()
        self.norm = self._copy_measuring(fused_norm)
        factor = None
        if limit is not None:
            # What is not finite stays so on its way to the other processes.
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

    def _take_the_rest(self) -> None:
        """Takes gradients that no backward pass of this round has added to, unless they are of another round."""
        for arena in self.arenas if not self._cleared else ():
            for index, param in enumerate(arena.params):
                if arena.gradients[index] is None and param.grad is not None:
                    arena.gradients[index] = laid_out_like(param.grad, param)

    def _copy_measuring(self, fused: bool) -> Tensor:
        """Copies all gradients to their places; the norm of all, in the same pass if `fused`."""
        sources: list[Tensor] = []
        places: list[Tensor] = []
        missing: list[Tensor] = []
        for arena in self.arenas:
            for gradient, place in zip(arena.gradients, self._flat(arena).views, strict=True):
                if gradient is None:
                    missing.append(place)
                else:
                    sources.append(gradient)
                    places.append(place)
        if missing:
            zero(missing)
        if fused and sources:
            return l2norm(sources, outputs=places, of_inputs=True)[0]
        if sources:
            torch._foreach_copy_(places, sources)
        return l2norm([self._flat(arena).values for arena in self.arenas])[0]

    # Buckets ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _start(self, bucket: int) -> Sent:
        place, number = self._buckets[bucket]
        arena = self.arenas[place]
        if not self._is_filled and (missing := arena.copy_gradients(number, self._pieces[bucket])):
            torch._foreach_zero_(missing)
        values = arena.bucket(self._flat(arena).values, number)
        shard = values if self._gets_all else arena.shard(self.shards(arena), number)
        return Sent(bucket, self._reduce(bucket, values, shard, self._factor))

    def _receive(self, sent: Sent) -> None:
        """Nothing to do: the mean has arrived where it is read."""

    # What the optimizer reads -----------------------------------------------------------------------------------------

    def stay_in_place(self, arena: Arena) -> bool:
        """Whether `of_units` gives the same tensors every time: it does."""
        return True

    def of_units(self, arena: Arena, units: Sequence[Piece]) -> list[Tensor]:
        """The mean's elements of stretches of this rank's shards."""
        return pick(self._mean(arena), units)

    def _mean(self, arena: Arena) -> Tensor | list[Tensor]:
        """This rank's flat shard of the mean, or its shards of the buckets of the buffer; zero between parameters."""
        return arena.shards(self._flat(arena)) if self._gets_all else self.shards(arena)

    def _flat(self, arena: Arena) -> FlatBuffer:
        assert arena.gradient_buffer is not None
        return arena.gradient_buffer


def make_arena(params: Sequence[Tensor], group_of: Sequence[int], groups: Groups, buckets: int) -> Arena:
    """An arena of parameters of one dtype and device, in about `buckets` buckets."""
    dtype = params[0].dtype
    alignment = max(1, ALIGNMENT // dtype.itemsize)
    elements = sum(round_up(param.numel(), alignment) for param in params)
    size = round_up(-(-elements // buckets), groups.ranks * alignment)
    return Arena(params, group_of, Dtypes(state_dtype(params[0]), dtype, dtype), groups, size * dtype.itemsize)


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
