"""Tensor lists on a GPU: a rule is one launch over pointer tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _device, _library
from .._partial_sums import TICKETS, partial_sums
from .._recording import Number
from . import config
from .rule import GRADIENT, OFF, SCALARS, SLOTS, ZEROS, Rule, Slots
from .tables import Layout, PointerTable, current_stream, keep_if_captured

# Imported at first use: importing apex needs no Triton.
kernels = _library.LazyModule(f"{__package__}.kernels")
reductions = _library.LazyModule(f"{__package__}.kernels_reductions")

# Types of numbers that are known to the host.
_NUMBERS = frozenset((float, int, bool))
_ON_HOST = (-1,) * SCALARS


class Sum(NamedTuple):
    """Where measured values are added up, and how: of each tensor into a row of `out` [tensors, columns], or of all.

    See `kernels_reductions.reduce_partials` for the rest.
    """

    out: Tensor
    per_tensor: bool = False
    root: bool = False
    average: bool = False
    factor: Tensor | None = None
    numbers: tuple[float, float, float] = (0.0, 0.0, 0.0)  # limit, margin and share

    @property
    def columns(self) -> int:
        return self.out.shape[-1]


class TritonLists:
    """Lists of dense tensors on one device, one dtype per list, whose tensors of equal index share their layout.

    `slots` has a list or None for each slot of a rule; `copy` gets a copy of what is written to slot 0. Addresses are
    kept, not tensors.
    """

    def __init__(self, slots: Slots, copy: Sequence[Tensor] | None = None) -> None:
        first = next(tensors for tensors in slots if tensors)
        self.device = first[0].device
        self._index = self.device.index
        self._stream = current_stream(self.device)
        dtypes = [tensors[0].dtype if tensors else None for tensors in (*slots, copy)]
        # As the kernel takes them: the names of types, and the numbers in a row of the table.
        self._types = tuple(None if t is None else str(t).removeprefix("torch.") for t in dtypes)
        self._columns = 1 + sum(t is not None for slot, t in enumerate(dtypes) if slot != GRADIENT)
        self._copied = copy is not None
        self.table = self._make_table(slots, copy)
        self.sizes = tuple(self.table.sizes)
        # By rule, and by block size and blocks per program.
        self._layouts: dict[Any, Layout] = {}
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
        self.table.point_to([tensors for tensors in lists if tensors], gradients)

    def usable(self) -> bool:
        """Whether work that is launched now may read the tables: on another stream they may not have arrived yet."""
        return self._stream == current_stream(self.device)

    # Passes -----------------------------------------------------------------------------------------------------------

    def apply(self, rule: Rule, hyper: dict[str, Any], flags: tuple[bool, ...] = (), **given: Any) -> Tensor | None:
        """Runs `rule`; returns what it measured, float32 [tensors, 2 or more]. See `TorchLists.apply`.

        A rule that measures is given `noop` or `overflow`, not both: they may be the same flag, and programs that see
        it raised by others store nothing.
        """
        if not rule.quantities:
            self._run(rule, hyper, flags, **given)
            return None
        columns = max(2, rule.quantities)
        return self._measured(rule, hyper, flags, Sum(self._empty(len(self.sizes), columns), per_tensor=True), given)

    def _measured(self, rule: Rule, hyper: dict[str, Any], flags: tuple[bool, ...], total: Sum, given: Any) -> Tensor:
        """Runs a rule that measures, and adds that up; by the same launch where the last program may do it.

        `given` are arguments of `_run` by name.
        """
        if self._finishes_each if total.per_tensor else self._finishes_all:
            self._run(rule, hyper, flags, total, **given)
        else:
            partials, layout = self._run(rule, hyper, flags, **given)
            bounds, rows = (layout.bounds, 0) if total.per_tensor else (None, layout.count)
            self._reduce(rule, partials, bounds, rows, total, given.get("noop"), given.get("grad_scale"))
        return total.out

    def total(self, per_tensor: Tensor, rule: Rule, *, root: bool = False) -> Tensor:
        """Sum (or maximum) over the tensors of the first quantity of `rule`, float32 [1]; its root if asked for."""
        total = Sum(self._empty(1), root=root)
        self._reduce(rule, per_tensor, None, len(self.sizes), total)
        return total.out

    def measured_total(self, rule: Rule, hyper: dict[str, Any], *, root: bool = False, **given: Any) -> Tensor:
        """Runs a rule that measures one quantity; returns its sum (or maximum) over all tensors, float32 [1]."""
        return self._measured(rule, hyper, (), Sum(self._empty(1), root=root), given)

    def measured_clip(self, rule: Rule, limit: float, margin: float, **scaling: Any) -> tuple[Tensor, Tensor]:
        """The norm of all gradients, and what brings them down to `limit`, `grad_scale` included; float32 [1] each.

        `rule` measures squares, or absolute values that are maximised.
        """
        empty = _device.empty_on(self.device)
        norm, factor = empty((1,), (1,), torch.float32), empty((1,), (1,), torch.float32)
        total = Sum(norm, root=not rule.maximum, factor=factor, numbers=(limit, margin, 0.0))
        return self._measured(rule, {}, (), total, scaling), factor

    def measured_average(self, rule: Rule, averages: Tensor, share: float, **scaling: Any) -> None:
        """Moves `averages`, float32 [tensors, 2], in column 0 by `share` towards what `rule` measures of each tensor.

        A negative average is none yet, and becomes what is measured.
        """
        total = Sum(averages, per_tensor=True, average=True, numbers=(0.0, 0.0, share))
        self._measured(rule, {}, (), total, scaling)

    # Launches ---------------------------------------------------------------------------------------------------------

    def _run(
        self,
        rule: Rule,
        hyper: dict[str, Any],
        flags: tuple[bool, ...],
        total: Sum | None = None,
        *,
        noop: Tensor | None = None,
        grad_scale: Tensor | None = None,
        overflow: Tensor | None = None,
        checks: tuple[int, ...] = (),
        whole: Tensor | None = None,
        nonfinite_counts: Tensor | None = None,
        seed: int | None = None,
        partials: Tensor | None = None,
    ) -> tuple[Any, Layout]:
        """Launches the rule; returns what it measured in each block, if it measures, and which block is whose.

        That goes into `partials` where they are given. The same launch adds it up if a `total` is given.
        """
        numbers, scalars, on_device = self._numbers(rule, hyper)
        table, layout = self.table, self._layout(rule)
        if not layout.count:
            return self._empty(0), layout
        if self._index is not None and _device.current_stream(self._index):  # the default stream cannot be captured
            keep_if_captured(self.device, table.fixed, table.moving, layout.programs, layout.bounds)
        tickets = finishing = out = factor = None
        bounds, by = None, (0.0, 0.0, 0.0)
        if rule.quantities and partials is None:
            partials, tickets = partial_sums(layout.count * rule.quantities, self.device)
        if total is None:
            tickets = None
        else:
            (out, per_tensor, root, average, factor, by), bounds = total, layout.bounds
            finishing = (per_tensor, root, average, out.shape[-1], layout.sum_block[per_tensor], factor is None)
        given = (noop, grad_scale, scalars, whole, overflow, nonfinite_counts)
        dtypes = tuple([None if tensor is None else tensor.dtype for tensor in given])
        settings = (flags, on_device, checks, dtypes, self._types, self._columns, table.aligned, seed is not None)
        shape = (layout.count, layout.programs is None, layout.block, layout.blocks_per_program)
        _rule_launch(rule, *shape, *settings, finishing)(
            (table.fixed, table.moving, layout.programs, *given, partials, bounds, tickets, out, factor),
            (*numbers, *ZEROS[len(numbers) :], seed or 0, *by),
        )
        return partials, layout

    def _reduce(
        self,
        rule: Rule,
        partials: Tensor,
        bounds: Tensor | None,
        rows: int,
        total: Sum,
        noop: Tensor | None = None,
        grad_scale: Tensor | None = None,
    ) -> None:
        """Adds up rows of `partials`: those of each tensor, between its `bounds`, or the first quantity of all."""
        if bounds is not None:
            keep_if_captured(self.device, bounds)
        results, quantities = (1, 1) if bounds is None else (len(self.sizes), rule.quantities)
        columns = partials.shape[1] if partials.dim() == 2 else rule.quantities
        reductions.reduce_partials(
            (results, quantities),
            (partials, bounds, noop, grad_scale, total.out, total.factor),
            (rows,),
            total.numbers,
            QUANTITIES=columns,
            MAXIMUM=rule.maximum,
            COLUMNS=total.columns,
            ROOT=total.root,
            AVERAGE=total.average,
            BLOCK=config.REDUCE_BLOCK,
            num_warps=config.REDUCE_WARPS,
        )

    def _empty(self, *shape: int) -> Tensor:
        return _device.empty_on(self.device)(shape, (*shape[1:], 1), torch.float32)

    # What launches depend on ------------------------------------------------------------------------------------------

    def _block_for(self, lists: int) -> int:
        """Elements of each of so many lists that a program handles at once."""
        return config.block(_device.facts(self.device), lists, max(self.sizes, default=0))

    def _blocks_per_program(self, block: int, lists: int) -> int:
        """How many blocks of so many lists a program that measures walks over."""
        blocks = sum(-(-size // block) for size in self.sizes)
        return config.blocks_per_program(_device.facts(self.device), blocks, lists * block)

    def _layout(self, rule: Rule) -> Layout:
        """A program per block; or, of a rule that measures, per so many that what they find takes little memory."""
        layout = self._layouts.get(rule)
        if layout is None:
            lists = len(rule.slots) + (self._copied and 0 in rule.writes)
            block = self._block_for(lists)
            shape = block, self._blocks_per_program(block, lists) if rule.quantities else 1
            if shape not in self._layouts:
                self._layouts[shape] = Layout(self.sizes, block, self.device, shape[1])
            layout = self._layouts[rule] = self._layouts[shape]
        return layout

    def _numbers(self, rule: Rule, hyper: dict[str, Any]) -> tuple[tuple[Any, ...], Tensor | None, tuple[int, ...]]:
        """The rule's numbers, 0 in place of those on the device; these; and where among them each is, else -1."""
        numbers = tuple(hyper.values()) if rule.scalars is None else rule.scalars(**hyper)
        if _NUMBERS.issuperset(map(type, numbers)):
            return numbers, None, _ON_HOST
        here = [self._here(value) for value in numbers]
        tensors = [value.double().reshape(()) for value in here if isinstance(value, Tensor)]
        positions = iter(range(SCALARS))
        places = [next(positions) if isinstance(value, Tensor) else -1 for value in here]
        known = tuple(0.0 if isinstance(value, Tensor) else value for value in here)
        on_device = torch.stack(tensors).float() if tensors else None
        return known, on_device, (*places, *_ON_HOST[len(places) :])

    def _here(self, value: Any) -> Any:
        """A number, or a tensor on this device: one on the CPU is read, which waits for nothing."""
        if isinstance(value, Number):
            return value.on(self.device)
        if isinstance(value, Tensor) and value.device != self.device:
            return float(value) if value.device.type == "cpu" else value.to(self.device)
        return value


@_device.launch_rule
def _rule_launch(
    rule: Rule,
    programs: int,
    one_each: bool,  # every tensor has one program, so that there is no table of programs
    block: int,
    blocks_per_program: int,
    flags: tuple[bool, ...],
    on_device: tuple[int, ...],
    checks: tuple[int, ...],
    dtypes: tuple[torch.dtype | None, ...],
    types: tuple[str | None, ...],
    columns: int,
    aligned: bool,
    seeded: bool,
    finishing: tuple[Any, ...] | None,
) -> Any:
    """The launch of a rule, which lacks its tables and numbers."""
    return kernels.apply_rule.prepare(
        (programs,),
        RULE=kernels.compiled(rule),
        TYPES=tuple(None if name is None else getattr(kernels.tl, name) for name in types),
        CONSTANTS=(  # see kernels.py
            (*flags, *OFF[len(flags) :]),
            on_device,
            *(tuple(slot in chosen for slot in range(SLOTS)) for chosen in (rule.reads, rule.writes, checks)),
            rule.quantities,
            rule.maximum,
            columns,
            aligned,
            seeded,
        ),
        FINISH=finishing and finishing[:5],
        BLOCK=block,
        BLOCKS=blocks_per_program,
        num_warps=config.WARPS,
        same_dtypes=True,
    )
