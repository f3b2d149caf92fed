"""Tensor lists on a GPU: a rule is one launch over pointer tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import _device, _library
from .._recording import Number
from .._workspace import TICKETS, partial_sums
from . import config
from .rule import FLAG_COUNT, GRADIENT, SCALARS, SLOTS, Rule, padded
from .tables import Layout, PointerTable, current_stream, keep_if_captured, upload

if TYPE_CHECKING:
    from .._launch import BoundLaunch

Slots = Sequence[Sequence[Tensor] | None]

# Imported at first use: importing apex needs no Triton.
kernels = _library.LazyModule(f"{__package__}.kernels")
reductions = _library.LazyModule(f"{__package__}.kernels_reductions")

# Types of numbers that are known to the host.
_NUMBERS = frozenset((float, int, bool))
_ZEROS = (0.0,) * SCALARS


class _Finish(NamedTuple):
    """What becomes of what programs measured: one result per tensor or of all, its root, a moving average."""

    per_tensor: bool
    root: bool = False
    averages: bool = False


_EACH, _AVERAGES = _Finish(True), _Finish(True, averages=True)
_TOTAL, _NORM = _Finish(False), _Finish(False, root=True)


class TritonLists:
    """Lists of dense tensors on one device, one dtype per list, whose tensors of equal index share their layout.

    `slots` has a list or None for each slot of a rule; `copy` gets a copy of what is written to slot 0. Addresses are
    kept, not tensors.
    """

    def __init__(self, slots: Slots, copy: Sequence[Tensor] | None = None) -> None:
        first = next(tensors for tensors in slots if tensors)
        self.device = first[0].device
        self.stream = current_stream(self.device)
        self.types = tuple(tensors[0].dtype if tensors else None for tensors in (*slots, copy))
        self._table = self._make_table(slots, copy)
        self.sizes = tuple(self._table.sizes)
        self._layouts: dict[tuple[int, int], Layout] = {}
        # Launches lack only tensors and floats: to find one here takes less than to build what it is compiled for.
        self._launches: dict[Any, tuple[BoundLaunch, Layout]] = {}
        self._bounds: dict[int, Tensor] = {}
        # Whether the program that is the last adds up: of all, and of every tensor, which must then have a program.
        publishes = _device.facts(self.device).publishes_for_all
        self._finishes_all = publishes and max(self.sizes, default=0) > 0
        self._finishes_each = publishes and min(self.sizes, default=0) > 0 and len(self.sizes) <= TICKETS
        self.point_to(slots, copy)

    def _make_table(self, slots: Slots, copy: Sequence[Tensor] | None) -> PointerTable:
        first = next(tensors for tensors in slots if tensors)
        return PointerTable(list(map(Tensor.numel, first)), self.device)

    def point_to(self, slots: Slots, copy: Sequence[Tensor] | None = None) -> None:
        """Other tensors of the same sizes and dtypes in place of the present ones."""
        lists = [tensors if tensors is None or type(tensors) is list else list(tensors) for tensors in (*slots, copy)]
        gradients = lists.pop(GRADIENT)
        self._table.point_to([tensors for tensors in lists if tensors], gradients)

    def has_gradients(self, gradients: list[Tensor]) -> bool:
        """Whether these, as many, lie where the present gradients do."""
        return self._table.has_gradients(gradients)

    def move_gradients(self, addresses: list[int]) -> None:
        """Other gradients, given their addresses."""
        self._table.update_moving(addresses)

    # Passes -----------------------------------------------------------------------------------------------------------

    def apply(
        self,
        rule: Rule,
        hyper: dict[str, Any],
        flags: tuple[bool, ...] = (),
        *,
        noop: Tensor | None = None,
        grad_scale: Tensor | None = None,
        whole: Tensor | None = None,
        overflow: Tensor | None = None,
        nonfinite_counts: Tensor | None = None,
        checks: tuple[int, ...] = (),
        seed: int | None = None,
    ) -> Tensor | None:
        """Runs `rule`; returns what it measured, float32 [tensors, 2 or more]. See `TorchLists.apply`."""
        scaling = (noop, grad_scale, overflow, checks)
        if not rule.quantities:
            self._run(rule, hyper, flags, *scaling, whole=whole, nonfinite_counts=nonfinite_counts, seed=seed)
            return None
        alone = whole is None and nonfinite_counts is None and seed is None
        if self._finishes_each and alone and _may_finish(noop, overflow):
            found = self._empty(len(self.sizes), max(2, rule.quantities))
            self._run(rule, hyper, flags, *scaling, finish=_EACH, out=found)
            return found
        partials, layout = self._run(
            rule, hyper, flags, *scaling, whole=whole, nonfinite_counts=nonfinite_counts, seed=seed
        )
        return self._per_tensor(rule, partials, layout, noop)

    def _per_tensor(self, rule: Rule, partials: Tensor, layout: Layout, noop: Tensor | None) -> Tensor:
        out = self._empty(len(self.sizes), max(2, rule.quantities))
        self._reduce(partials, layout.bounds, out, noop=noop, quantities=rule.quantities, maximum=rule.maximum)
        return out

    def total(self, per_tensor: Tensor, *, maximum: bool = False, root: bool = False) -> Tensor:
        """Sum (or maximum) over the tensors of the first quantity, float32 [1]; its root if asked for."""
        out = self._empty(1)
        bounds = self._bounds_of_all(len(self.sizes))
        self._reduce(per_tensor, bounds, out, columns=per_tensor.shape[1], maximum=maximum, root=root)
        return out

    def measured_total(
        self,
        rule: Rule,
        hyper: dict[str, Any],
        *,
        root: bool = False,
        noop: Tensor | None = None,
        grad_scale: Tensor | None = None,
        overflow: Tensor | None = None,
        checks: tuple[int, ...] = (),
    ) -> Tensor:
        """Runs a rule that measures one quantity; returns its sum (or maximum) over all tensors, float32 [1]."""
        out = self._empty(1)
        if self._finishes_all and _may_finish(noop, overflow):
            finish = _NORM if root else _TOTAL
            self._run(rule, hyper, (), noop, grad_scale, overflow, checks, finish=finish, out=out)
        else:
            self._reduce_all(rule, hyper, out, noop, grad_scale, overflow, checks, root=root)
        return out

    def measured_clip(
        self,
        rule: Rule,
        limit: float,
        margin: float,
        *,
        noop: Tensor | None = None,
        grad_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The norm of all gradients, and what brings them down to `limit`, `grad_scale` included; float32 [1] each.

        `rule` measures squares, or absolute values that are maximised. See `kernels_reductions.reduce_partials`.
        """
        norm, factor = self._empty(1), self._empty(1)
        finish = _TOTAL if rule.maximum else _NORM
        if self._finishes_all:
            by = (limit, margin, 0.0)
            self._run(rule, {}, (), noop, grad_scale, finish=finish, out=norm, factor=factor, by=by)
        else:
            self._reduce_all(
                rule, {}, norm, noop, grad_scale, root=finish.root, factor=factor, limit=limit, margin=margin
            )
        return norm, factor

    def measured_average(
        self,
        rule: Rule,
        averages: Tensor,
        share: float,
        *,
        noop: Tensor | None = None,
        grad_scale: Tensor | None = None,
    ) -> None:
        """Moves `averages`, float32 [tensors, 2], in column 0 by `share` towards what `rule` measures of each tensor.

        A negative average is none yet, and becomes what is measured.
        """
        if self._finishes_each:
            self._run(rule, {}, (), noop, grad_scale, finish=_AVERAGES, out=averages, by=(0.0, 0.0, share))
            return
        partials, layout = self._run(rule, {}, (), noop, grad_scale)
        self._reduce(partials, layout.bounds, averages, noop=noop, maximum=rule.maximum, share=share)

    # Launches ---------------------------------------------------------------------------------------------------------

    def _run(
        self,
        rule: Rule,
        hyper: dict[str, Any],
        flags: tuple[bool, ...],
        noop: Tensor | None = None,
        grad_scale: Tensor | None = None,
        overflow: Tensor | None = None,
        checks: tuple[int, ...] = (),
        *,
        whole: Tensor | None = None,
        nonfinite_counts: Tensor | None = None,
        seed: int | None = None,
        finish: _Finish | None = None,
        out: Tensor | None = None,
        factor: Tensor | None = None,
        by: tuple[float, float, float] = (0.0, 0.0, 0.0),
    ) -> tuple[Any, Layout]:
        """Launches the rule; returns what it measured in each block, if it measures, and which block is whose.

        With `finish` the same launch adds that up into `out`; `by` are limit, margin and share of
        `kernels.apply_and_reduce`.
        """
        numbers, scalars, marks = self._numbers(rule, hyper)
        table = self._table
        key = (
            rule,
            flags,
            marks,
            checks,
            finish,
            seed is None,
            table.aligned,
            noop if noop is None else noop.dtype,
            grad_scale if grad_scale is None else grad_scale.dtype,
            overflow if overflow is None else overflow.dtype,
            whole is None,
            nonfinite_counts is None,
            factor is None,
        )
        known = self._launches.get(key)
        if known is None:
            layout = self._layout(rule)
            columns = 0 if out is None else out.shape[-1]
            launch = self._bind(rule, layout, flags, marks, checks, seed is not None, finish, columns)
            known = self._launches[key] = launch, layout
        launch, layout = known
        if not layout.count:
            return self._partials(0, rule.quantities)[0], layout
        keep_if_captured(self.device, table.fixed, table.moving, layout.programs, layout.bounds)
        partials, tickets = self._partials(layout.count, rule.quantities) if rule.quantities else (None, None)
        floats = (*map(float, numbers), *_ZEROS[len(numbers) :])
        common = (table.fixed, table.moving, layout.programs, noop, grad_scale, scalars)
        if finish is None:
            launch(*common, whole, partials, overflow, nonfinite_counts, floats=(*floats, float(seed or 0)))
        else:
            measured = (overflow, partials, layout.bounds, tickets, out, factor)
            launch(*common, *measured, floats=(*floats, *map(float, by)))
        return partials, layout

    def _bind(
        self,
        rule: Rule,
        layout: Layout,
        flags: tuple[bool, ...],
        marks: tuple[bool, ...],
        checks: tuple[int, ...],
        stochastic: bool,
        finish: _Finish | None,
        columns: int,
    ) -> BoundLaunch:
        types = tuple(None if t is None else getattr(kernels.tl, str(t).removeprefix("torch.")) for t in self.types)
        constants = (  # see kernels_blocks.py
            padded(flags, FLAG_COUNT, False),
            padded(tuple(sum(marks[:i]) if mark else -1 for i, mark in enumerate(marks)), SCALARS, -1),
            tuple(slot in rule.reads for slot in range(SLOTS)),
            tuple(slot in rule.writes for slot in range(SLOTS)),
            tuple(slot in checks for slot in range(SLOTS)),
            rule.quantities,
            rule.maximum,
            1 + sum(dtype is not None for slot, dtype in enumerate(self.types) if slot != GRADIENT),
            self._table.aligned,
            stochastic,
        )
        given: tuple[Any, ...] = (kernels.compiled(rule), types, constants, layout.block, layout.together)
        floats, kernel = (0.0,) * (SCALARS + 1), kernels.apply_rule
        if finish is not None:
            block = config.last_block(layout.longest if finish.per_tensor else layout.count)
            given = (*given, finish.per_tensor, columns, finish.root, finish.averages, block)
            floats, kernel = (0.0,) * (SCALARS + 3), kernels.apply_and_reduce
        return kernel.bind((layout.count,), floats, given, device=self.device, num_warps=config.WARPS)

    def _reduce_all(
        self,
        rule: Rule,
        hyper: dict[str, Any],
        out: Tensor,
        noop: Tensor | None,
        grad_scale: Tensor | None,
        overflow: Tensor | None = None,
        checks: tuple[int, ...] = (),
        **how: Any,
    ) -> None:
        """Runs a rule that measures one quantity, and adds it up over all tensors by further launches."""
        partials, layout = self._run(rule, hyper, (), noop, grad_scale, overflow, checks)
        count, columns = layout.count, 1
        if count > config.TOTAL_AT_ONCE:
            partials = self._per_tensor(rule, partials, layout, noop)
            count, columns = partials.shape
        bounds = self._bounds_of_all(count)
        self._reduce(
            partials, bounds, out, noop=noop, grad_scale=grad_scale, columns=columns, maximum=rule.maximum, **how
        )

    def _reduce(
        self,
        partials: Tensor,
        bounds: Tensor,
        out: Tensor,
        *,
        noop: Tensor | None = None,
        grad_scale: Tensor | None = None,
        quantities: int = 1,
        columns: int | None = None,
        maximum: bool = False,
        root: bool = False,
        share: float | None = None,
        factor: Tensor | None = None,
        limit: float = 0.0,
        margin: float = 0.0,
    ) -> None:
        """See `kernels_reductions.reduce_partials`; `columns` are those of `partials`, if not one per quantity."""
        keep_if_captured(self.device, bounds)
        reductions.reduce_partials(
            (bounds.shape[0] - 1, quantities),
            (partials, bounds, noop, grad_scale, out, factor),
            (),
            (float(limit), float(margin), float(share or 0.0)),
            QUANTITIES=columns or quantities,
            MAXIMUM=maximum,
            COLUMNS=out.shape[-1],
            ROOT=root,
            AVERAGE=share is not None,
            BLOCK=config.REDUCE_BLOCK,
            num_warps=config.REDUCE_WARPS,
        )

    def _bounds_of_all(self, count: int) -> Tensor:
        bounds = self._bounds.get(count)
        if bounds is None:
            bounds = self._bounds[count] = upload([0, count], torch.int32, self.device)
        return bounds

    def _partials(self, count: int, quantities: int) -> tuple[Tensor, Tensor]:
        """Memory for what programs measure, which the next launch reads and no later one, and tickets for them."""
        return partial_sums(count * quantities, self.device)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    # What launches depend on ------------------------------------------------------------------------------------------

    def _block_for(self, lists: int) -> int:
        """Elements of each of so many lists that a program handles at once."""
        return config.block(_device.facts(self.device), lists)

    def _blocks_together(self, block: int, lists: int) -> int:
        """How many blocks of so many lists a program that measures walks over."""
        blocks = sum(-(-size // block) for size in self.sizes)
        return config.blocks_together(_device.facts(self.device), blocks, lists * block)

    def _layout(self, rule: Rule) -> Layout:
        """A program per block; or, of a rule that measures, per so many that what they find takes little memory."""
        copied = self.types[SLOTS] is not None and 0 in rule.writes
        lists = len(rule.slots) + copied
        block = self._block_for(lists)
        together = self._blocks_together(block, lists) if rule.quantities else 1
        layout = self._layouts.get((block, together))
        if layout is None:
            layout = self._layouts[block, together] = Layout(self.sizes, block, self.device, together)
        return layout

    def _numbers(self, rule: Rule, hyper: dict[str, Any]) -> tuple[tuple[Any, ...], Tensor | None, tuple[bool, ...]]:
        """The rule's numbers: with 0 in place of those on the device, these, and which they are."""
        numbers = rule.scalars(**hyper)
        if _NUMBERS.issuperset(map(type, numbers)):
            return numbers, None, ()
        here = tuple(self._here(value) for value in numbers)
        marks = tuple(isinstance(value, Tensor) for value in here)
        on_device = [value.double().reshape(()) for value in here if isinstance(value, Tensor)]
        numbers = tuple(0.0 if mark else value for value, mark in zip(here, marks, strict=True))
        return numbers, torch.stack(on_device).float() if on_device else None, marks

    def _here(self, value: Any) -> Any:
        """A number, or a tensor on this device: one on the CPU is read, which waits for nothing."""
        if isinstance(value, Number):
            return value.on(self.device)
        if isinstance(value, Tensor) and value.device != self.device:
            return float(value) if value.device.type == "cpu" else value.to(self.device)
        return value


def _may_finish(noop: Tensor | None, overflow: Tensor | None) -> bool:
    """Whether all programs of a launch see the same `noop`: not those after one that raised it, and then none is last.

    The two may be views of the same number.
    """
    return noop is None or overflow is None
