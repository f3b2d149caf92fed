"""Tensor lists on a GPU: a rule is one launch over pointer tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _device, _library
from .._graph_numbers import Number
from .._tickets import TICKETS, tickets_on
from . import config
from .codecs import NUMBERS, REMAINDERS, Encodings, has_scales
from .rule import GRADIENT, OFF, SCALARS, SLOTS, ZEROS, Rule, Slots
from .tables import Layout, PointerTable, current_stream, keep_if_captured
from .torch_lists import StateSeed, move_averages

# Imported at first use: importing apex needs no Triton.
kernels = _library.LazyModule(f"{__package__}.kernels")
reductions = _library.LazyModule(f"{__package__}.kernels_reductions")

# Types of numbers whose values the host knows.
_NUMBERS = frozenset((float, int, bool))
_ON_HOST = (-1,) * (SCALARS + 1)
_NO_CODECS = (0,) * SLOTS
# Types that replace, in kernels, types that not every GPU has.
_STAND_INS = {"float8_e4m3fn": "uint8"}


class Sum(NamedTuple):
    """A sum of measurements: of each tensor into its row of `out` [tensors, columns], or of all tensors.

    See `kernels_reductions.reduce_partials` for the other fields.
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

    `slots` has a list or None for each slot of a rule; `copy` gets a copy of the values written to slot 0. `encodings`
    are codecs of slots, with their companions. Keeps addresses instead of tensors.
    """

    def __init__(self, slots: Slots, copy: Sequence[Tensor] | None = None, encodings: Encodings | None = None) -> None:
        first = next(tensors for tensors in slots if tensors)
        self.device = first[0].device
        self._index = self.device.index
        self._stream = current_stream(self.device)
        dtypes = [tensors[0].dtype if tensors else None for tensors in (*slots, copy)]
        # In the kernel's form: the names of types, and the numbers in a row of the table.
        names = [None if t is None else str(t).removeprefix("torch.") for t in dtypes]
        self._types = tuple(None if name is None else _STAND_INS.get(name, name) for name in names)
        self._columns = 1 + sum(t is not None for slot, t in enumerate(dtypes) if slot != GRADIENT)
        self._codecs, self._has_remainders, self._has_codes = _NO_CODECS, False, False
        if encodings:
            self._has_codes = any(has_scales(each.codec) for each in encodings.values())
            self._has_remainders = 0 in encodings and encodings[0].codec in REMAINDERS
            self._columns += sum(encoding.companions is not None for encoding in encodings.values())
            self._codecs = tuple(NUMBERS[encodings[slot].codec] if slot in encodings else 0 for slot in range(SLOTS))
        self._copied = copy is not None
        # Positions of shards in whole tensors (`codecs.NoisePlace`); None if the lists hold whole tensors.
        self.noise_places: Tensor | None = None
        self.table = self._make_table(slots, copy)
        self.sizes = tuple(self.table.sizes)
        # Keys: a rule, or a block size, blocks per program and stages.
        self._layouts: dict[Any, Layout] = {}
        # Whether the last program adds up the sums: of all tensors, or of every tensor, which must then have a program.
        publishes = _device.facts(self.device).publishes_for_all
        self._finishes_all = publishes and max(self.sizes, default=0) > 0
        self._finishes_each = publishes and min(self.sizes, default=0) > 0 and len(self.sizes) <= TICKETS
        self.point_to(slots, copy, encodings)

    def _make_table(self, slots: Slots, copy: Sequence[Tensor] | None) -> PointerTable:
        first = next(tensors for tensors in slots if tensors)
        return PointerTable(list(map(Tensor.numel, first)), self.device)

    def point_to(self, slots: Slots, copy: Sequence[Tensor] | None = None, encodings: Encodings | None = None) -> None:
        """Replace the tensors by others of the same sizes and dtypes."""
        lists = [tensors if tensors is None or type(tensors) is list else list(tensors) for tensors in (*slots, copy)]
        gradients = lists[GRADIENT]
        fixed: list[list[Tensor]] = []
        for slot, tensors in enumerate(lists):
            if tensors and slot != GRADIENT:
                fixed.append(tensors)
                if encodings and slot in encodings and encodings[slot].companions is not None:
                    fixed.append(list(encodings[slot].companions))  # type: ignore[arg-type]
        self.table.point_to(fixed, gradients)

    def usable(self) -> bool:
        """Return whether work launched now may read the tables: on another stream they may not have arrived yet."""
        return self._stream == current_stream(self.device)

    def apply(self, rule: Rule, hyper: dict[str, Any], flags: tuple[bool, ...] = (), **given: Any) -> Tensor | None:
        """Run `rule`; return its measurements, float32 [tensors, 2 or more], or None. See `TorchLists.apply`.

        A rule that measures takes `noop` or `overflow`, not both: they may be the same flag, and programs that see it
        set by others would store nothing.
        """
        if not rule.quantities:
            self._run(rule, hyper, flags, **given)
            return None
        columns = max(2, rule.quantities)
        return self._measured(rule, hyper, flags, Sum(self._empty(len(self.sizes), columns), per_tensor=True), given)

    def _measured(self, rule: Rule, hyper: dict[str, Any], flags: tuple[bool, ...], total: Sum, given: Any) -> Tensor:
        """Run a rule that measures, and sum its measurements: in the same launch if its last program may do that.

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
        """Return the sum (or maximum) of a rule's first quantity over all tensors, float32 [1]; its root if `root`."""
        total = Sum(self._empty(1), root=root)
        self._reduce(rule, per_tensor, None, len(self.sizes), total)
        return total.out

    def measured_total(self, rule: Rule, hyper: dict[str, Any], *, root: bool = False, **given: Any) -> Tensor:
        """Run a rule that measures one quantity; return its sum (or maximum) over all tensors, float32 [1]."""
        return self._measured(rule, hyper, (), Sum(self._empty(1), root=root), given)

    def measured_clip(self, rule: Rule, limit: float, margin: float, **scaling: Any) -> tuple[Tensor, Tensor]:
        """Return the norm of all gradients, and the factor that limits it to `limit`, times `grad_scale`; float32 [1].

        `rule` measures squares, or absolute values that are maximised.
        """
        empty = _device.empty_on(self.device)
        norm, factor = empty((1,), (1,), torch.float32), empty((1,), (1,), torch.float32)
        total = Sum(norm, root=not rule.maximum, factor=factor, numbers=(limit, margin, 0.0))
        return self._measured(rule, {}, (), total, scaling), factor

    def measured_average(
        self,
        rule: Rule,
        averages: Tensor,
        share: float,
        over_shards: Callable[[Tensor], Tensor] | None = None,
        **scaling: Any,
    ) -> None:
        """Move column 0 of `averages`, float32 [tensors, 2], by `share` towards the rule's measurement of each tensor.

        A negative average means that there is none yet; it becomes the measurement. `over_shards` adds up (or
        maximises) the measurements of tensors that are shards.
        """
        if over_shards is not None:
            measured = self.apply(rule, {}, **scaling)
            assert measured is not None
            move_averages(averages, over_shards(measured), share, scaling.get("noop"))
            return
        total = Sum(averages, per_tensor=True, average=True, numbers=(0.0, 0.0, share))
        self._measured(rule, {}, (), total, scaling)

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
        seed: Any = None,
        partials: Tensor | None = None,
    ) -> tuple[Any, Layout]:
        """Launch the rule; return its measurements in each block, if it measures, and the layout of the blocks.

        Measurements go into `partials` if these are given. The same launch sums them if a `total` is given.
        """
        rounds = seed is not None and not isinstance(seed, StateSeed)
        numbers, scalars, on_device = self._numbers(rule, hyper, seed.value if isinstance(seed, StateSeed) else seed)
        table, layout = self.table, self._layout(rule)
        if not layout.count:
            return self._empty(0), layout
        if self._index is not None and _device.current_stream(self._index):  # the default stream cannot be captured
            keep_if_captured(self.device, table.fixed, table.moving, layout.programs, layout.bounds)
        tickets = finishing = out = factor = None
        bounds, by = None, (0.0, 0.0, 0.0)
        if rule.quantities and partials is None:
            partials = self._empty(layout.count * rule.quantities)
            tickets = None if total is None else tickets_on(self.device)
        if total is not None:
            (out, per_tensor, root, average, factor, by), bounds = total, layout.bounds
            at_once = config.sum_block(layout.most if per_tensor else layout.count)
            finishing = (per_tensor, root, average, out.shape[-1], at_once, factor is None)
        places = None if seed is None else self.noise_places
        inputs = (noop, grad_scale, scalars, whole, overflow, nonfinite_counts, places)
        dtypes = tuple([None if tensor is None else tensor.dtype for tensor in inputs])
        rounds = rounds and not self._has_remainders
        settings = (flags, on_device, checks, dtypes, self._types, self._columns, table.aligned, rounds, self._codecs)
        warps = config.warps(_device.facts(self.device), layout.block, self._has_codes)
        for count, programs, fixed in self._launches(rule, layout):
            shape = (count, programs is None, layout.block, layout.blocks_per_program, layout.stages, warps)
            _rule_launch(rule, *shape, *settings, finishing)(
                (fixed, table.moving, programs, *inputs, partials, bounds, tickets, out, factor), (*numbers, *by)
            )
        return partials, layout

    def _launches(self, rule: Rule, layout: Layout) -> Iterator[tuple[int, Tensor | None, Tensor | None]]:
        """Yield the number of programs, the table of programs and the table of addresses of each launch of a rule."""
        yield layout.count, layout.programs, self.table.fixed

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
        """Sum rows of `partials`: the rows of each tensor, between its `bounds`, or the first quantity of all rows."""
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

    def _block_for(self, lists: int) -> int:
        """Return the elements of each of `lists` lists that a program handles at once."""
        return config.block(_device.facts(self.device), lists, max(self.sizes, default=0))

    def _walk(self, block: int, lists: int, measures: bool) -> tuple[int, int]:
        """Return how many blocks of `lists` lists a program walks over, and the stages of its loads."""
        blocks, facts = sum(-(-size // block) for size in self.sizes), _device.facts(self.device)
        if measures:
            return config.blocks_per_program(facts, blocks, lists * block), 1
        return config.walk(facts, blocks, self._has_codes)

    def _layout(self, rule: Rule) -> Layout:
        """Return the layout for a rule: a program per block, or, if it measures, per several, to save memory."""
        layout = self._layouts.get(rule)
        if layout is None:
            lists = len(rule.slots) + (self._copied and 0 in rule.writes)
            block = self._block_for(lists)
            shape = (block, *self._walk(block, lists, bool(rule.quantities)))
            if shape not in self._layouts:
                self._layouts[shape] = Layout(self.sizes, block, self.device, *shape[1:])
            layout = self._layouts[rule] = self._layouts[shape]
        return layout

    def _numbers(
        self, rule: Rule, hyper: dict[str, Any], seed: Any
    ) -> tuple[tuple[Any, ...], Tensor | None, tuple[int, ...]]:
        """Return the rule's numbers and the seed, 0 if on the device; a tensor of the ones on the device; its indices.

        A number that the host knows has the index -1.
        """
        numbers = tuple(hyper.values()) if rule.scalars is None else rule.scalars(**hyper)
        numbers = (*numbers, *ZEROS[len(numbers) :], 0 if seed is None else seed)
        if _NUMBERS.issuperset(map(type, numbers)):
            return numbers, None, _ON_HOST
        here = [self._here(value) for value in numbers]
        tensors = [value.double().reshape(()) for value in here if isinstance(value, Tensor)]
        positions = iter(range(SCALARS + 1))
        indices = [next(positions) if isinstance(value, Tensor) else -1 for value in here]
        known = tuple(0.0 if isinstance(value, Tensor) else value for value in here)
        on_device = torch.stack(tensors).float() if tensors else None
        return known, on_device, tuple(indices)

    def _here(self, value: Any) -> Any:
        """Return a number, or a tensor on this device. Reads a CPU tensor, which waits for nothing."""
        if isinstance(value, Number):
            return value.on(self.device)
        if isinstance(value, Tensor) and value.device != self.device:
            return float(value) if value.device.type == "cpu" else value.to(self.device)
        return value


@_device.launch_rule
def _rule_launch(
    rule: Rule,
    programs: int,
    one_each: bool,  # every tensor has one program, so there is no table of programs
    block: int,
    blocks_per_program: int,
    stages: int,
    warps: int,
    flags: tuple[bool, ...],
    on_device: tuple[int, ...],
    checks: tuple[int, ...],
    dtypes: tuple[torch.dtype | None, ...],
    types: tuple[str | None, ...],
    columns: int,
    aligned: bool,
    seeded: bool,
    codecs: tuple[int, ...],
    finishing: tuple[Any, ...] | None,
) -> Any:
    """Prepare the launch of a rule, without its tables and numbers."""
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
            codecs,
        ),
        FINISH=finishing and finishing[:5],
        BLOCK=block,
        BLOCKS=blocks_per_program,
        STAGES=stages,
        num_warps=warps,
    )
