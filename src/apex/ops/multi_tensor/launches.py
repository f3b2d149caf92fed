"""Launches over address tables: what runs on a GPU when a rule is applied to tensor lists."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import _device
from . import config
from .rule import FLAG_COUNT, GRADIENT, SCALARS, SLOTS, Rule, padded
from .tables import Layout, PointerTable, current_stream, keep_if_captured

if TYPE_CHECKING:
    from .._launch import BoundLaunch

Slots = Sequence[Sequence[Tensor] | None]

# Types of numbers that are known to the host.
_NUMBERS = frozenset((float, int, bool))
_ZEROS = (0.0,) * SCALARS


@functools.cache
def _kernels() -> ModuleType:
    """The kernels, imported at first use: importing apex needs no Triton."""
    from . import kernels

    return kernels


@functools.cache
def reductions() -> ModuleType:
    """The kernels that follow a measuring one, imported at first use."""
    from . import kernels_reductions as kernels

    return kernels


@functools.cache
def _triton_type(dtype: torch.dtype | None) -> Any:
    import triton.language as tl

    return None if dtype is None else getattr(tl, str(dtype).removeprefix("torch."))


class Finish(NamedTuple):
    """What becomes of what programs measured: one result per tensor or of all, its root, a moving average."""

    per_tensor: bool
    root: bool = False
    averages: bool = False


@dataclass
class _Measuring:
    """A launch that measures, and memory for what its programs find and how many of them came so far."""

    launch: BoundLaunch
    layout: Layout
    memory: tuple[Tensor, Tensor] | None = None


class ListLaunches:
    """Tables and launches of lists of dense tensors on one device, one dtype per list, alike in layout by index.

    `slots` has a list or None for each slot of a rule; `copy` gets a copy of what is written to slot 0.
    """

    def __init__(self, slots: Slots, copy: Sequence[Tensor] | None = None) -> None:
        first = next(tensors for tensors in slots if tensors)
        self.device = first[0].device
        self.stream = current_stream(self.device)
        lists = (*slots, copy)
        self.types = tuple(tensors[0].dtype if tensors else None for tensors in lists)
        self.sizes = tuple(tensor.numel() for tensor in first)
        self._table = PointerTable(self.sizes, self.device)
        self._begin()
        self.point_to(slots, copy)

    def _begin(self) -> None:
        self._layouts: dict[Any, Layout] = {}
        self._launches: dict[Any, tuple[BoundLaunch, Layout]] = {}
        self._measurings: dict[Any, _Measuring] = {}
        self._reductions: dict[Any, BoundLaunch] = {}
        self._whole_bounds: dict[int, Tensor] = {}
        self._scratches: dict[tuple[int, ...], Tensor] = {}
        # Whether the program that is the last adds up: of all, and of every tensor, which must then have a program.
        publishes = _device.facts(self.device).publishes_for_all
        self._finishes_all = publishes and max(self.sizes, default=0) > 0
        self._finishes_each = publishes and min(self.sizes, default=0) > 0

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

    def point_to(self, slots: Slots, copy: Sequence[Tensor] | None = None) -> None:
        """Other tensors of the same sizes and dtypes in place of the present ones."""
        fixed = [list(tensors) for slot, tensors in enumerate((*slots, copy)) if slot != GRADIENT and tensors]
        gradients = slots[GRADIENT]
        self._table.point_to(fixed, None if gradients is None else list(gradients))

    def has_gradients(self, gradients: list[Tensor]) -> bool:
        """Whether these, as many, lie where the present gradients do."""
        return self._table.has_gradients(gradients)

    def move_gradients(self, addresses: list[int]) -> None:
        """Other gradients, given their addresses."""
        self._table.update_moving(addresses)

    def _run(
        self,
        rule: Rule,
        hyper: dict[str, Any],
        flags: tuple[bool, ...],
        noop: Tensor | None,
        grad_scale: Tensor | None,
        whole: Tensor | None,
        overflow: Tensor | None,
        culprits: Tensor | None,
        checks: tuple[int, ...],
        seed: int | None,
    ) -> tuple[Tensor | None, Layout]:
        """Launches the rule; returns what it measured in each block, and which block is whose."""
        numbers, scalars, marks = self._numbers(rule, hyper)
        table = self._table
        key = (
            rule,
            flags,
            marks,
            checks,
            seed is None,
            table.aligned,
            noop if noop is None else noop.dtype,
            grad_scale if grad_scale is None else grad_scale.dtype,
            whole is None,
            overflow if overflow is None else overflow.dtype,
            culprits is None,
        )
        known = self._launches.get(key)
        if known is None:
            layout = self._layout(rule)
            known = self._launches[key] = self._bind(rule, layout, flags, marks, checks, seed is not None), layout
        launch, layout = known
        partials = None
        if rule.quantities:
            partials = self._scratch((layout.count, rule.quantities))
        if layout.count:
            keep_if_captured(self.device, table.fixed, table.moving, layout.programs)
            launch(
                table.fixed,
                table.moving,
                layout.programs,
                noop,
                grad_scale,
                scalars,
                whole,
                partials,
                overflow,
                culprits,
                floats=(*map(float, numbers), *_ZEROS[len(numbers) :], float(seed or 0)),
            )
        return partials, layout

    def _measure(
        self,
        finish: Finish,
        rule: Rule,
        hyper: dict[str, Any],
        flags: tuple[bool, ...],
        out: Tensor,
        noop: Tensor | None,
        grad_scale: Tensor | None,
        overflow: Tensor | None = None,
        checks: tuple[int, ...] = (),
        factor: Tensor | None = None,
        by: tuple[float, float, float] = (0.0, 0.0, 0.0),
    ) -> None:
        """Launches a rule that measures, and that adds up into `out` too; `by` are limit, margin and share.

        See `kernels.apply_and_reduce`.
        """
        numbers, scalars, marks = self._numbers(rule, hyper)
        table = self._table
        key = (
            finish,
            rule,
            flags,
            marks,
            checks,
            table.aligned,
            noop if noop is None else noop.dtype,
            grad_scale if grad_scale is None else grad_scale.dtype,
            overflow if overflow is None else overflow.dtype,
            factor is None,
        )
        known = self._measurings.get(key)
        if known is None:
            layout = self._layout(rule)
            bound = self._bind_measuring(finish, rule, layout, flags, marks, checks, out.shape[-1])
            known = self._measurings[key] = _Measuring(bound, layout)
        layout = known.layout
        if known.memory is not None and current_stream(self.device) == self.stream:
            partials, tickets = known.memory
        else:
            partials = self._scratch((layout.count, rule.quantities))
            tickets = torch.zeros(len(self.sizes) if finish.per_tensor else 1, dtype=torch.int32, device=self.device)
            keep_if_captured(self.device, table.fixed, table.moving, layout.programs, layout.bounds)
            if current_stream(self.device) == self.stream:
                known.memory = partials, tickets
        known.launch(
            table.fixed,
            table.moving,
            layout.programs,
            noop,
            grad_scale,
            scalars,
            overflow,
            partials,
            layout.bounds,
            tickets,
            out,
            factor,
            floats=(*map(float, numbers), *_ZEROS[len(numbers) :], *map(float, by)),
        )

    def _reduce(
        self,
        partials: Tensor,
        bounds: Tensor,
        out: Tensor,
        *,
        noop: Tensor | None = None,
        quantities: int = 1,
        maximum: bool = False,
        root: bool = False,
        share: float | None = None,
        grad_scale: Tensor | None = None,
        clip: tuple[Tensor, float, float] | None = None,
    ) -> None:
        """See `kernels_reductions.reduce_partials`; `clip` has the factor that is written, the limit and the margin."""
        constants = (partials.shape[1], maximum, out.shape[-1], root, share is not None, config.REDUCE_BLOCK)
        programs = bounds.shape[0] - 1
        key = (programs, quantities, constants, noop if noop is None else noop.dtype, grad_scale is None, clip is None)
        launch = self._reductions.get(key)
        if launch is None:
            launch = self._reductions[key] = reductions().reduce_partials.bind(
                (programs, quantities),
                (0.0, 0.0, 0.0),
                constants,
                device=self.device,
                num_warps=config.REDUCE_WARPS,
            )
        keep_if_captured(self.device, bounds)
        factor, *numbers = clip or (None, 0.0, 0.0)
        launch(partials, bounds, noop, grad_scale, out, factor, floats=(*map(float, numbers), float(share or 0.0)))

    def _bind(
        self,
        rule: Rule,
        layout: Layout,
        flags: tuple[bool, ...],
        marks: tuple[bool, ...],
        checks: tuple[int, ...],
        stochastic: bool,
    ) -> BoundLaunch:
        constants = (
            *self._constants(rule, flags, marks, checks),
            stochastic,
            layout.block,
            layout.together,
        )
        return _kernels().apply_rule.bind(
            (layout.count,), (0.0,) * (SCALARS + 1), constants, device=self.device, num_warps=config.WARPS
        )

    def _bind_measuring(
        self,
        finish: Finish,
        rule: Rule,
        layout: Layout,
        flags: tuple[bool, ...],
        marks: tuple[bool, ...],
        checks: tuple[int, ...],
        columns: int,
    ) -> BoundLaunch:
        constants = (
            *self._constants(rule, flags, marks, checks),
            layout.block,
            layout.together,
            finish.per_tensor,
            columns,
            finish.root,
            finish.averages,
            config.last_block(layout.longest if finish.per_tensor else layout.count),
        )
        return _kernels().apply_and_reduce.bind(
            (layout.count,), (0.0,) * (SCALARS + 3), constants, device=self.device, num_warps=config.WARPS
        )

    def _constants(
        self, rule: Rule, flags: tuple[bool, ...], marks: tuple[bool, ...], checks: tuple[int, ...]
    ) -> tuple[Any, ...]:
        """What both kernels are compiled for, from RULE to ALIGNED."""
        return (
            _kernels().compiled(rule),
            padded(flags, FLAG_COUNT, False),
            padded(marks, SCALARS, False),
            tuple(slot in rule.reads for slot in range(SLOTS)),
            tuple(slot in rule.writes for slot in range(SLOTS)),
            tuple(slot in checks for slot in range(SLOTS)),
            rule.quantities,
            rule.maximum,
            tuple(map(_triton_type, self.types)),
            1 + sum(dtype is not None for slot, dtype in enumerate(self.types) if slot != GRADIENT),
            self._table.aligned,
        )

    def _scratch(self, shape: tuple[int, ...]) -> Tensor:
        """Memory for numbers that the next launch on this stream reads, and no later one.

        The same each time, because to ask for it takes as long as half a launch; but other streams, and CUDA graphs,
        have their own.
        """
        if current_stream(self.device) != self.stream:
            return torch.empty(shape, dtype=torch.float32, device=self.device)
        memory = self._scratches.get(shape)
        if memory is None:
            memory = self._scratches[shape] = torch.empty(shape, dtype=torch.float32, device=self.device)
        return memory

    def _numbers(self, rule: Rule, hyper: dict[str, Any]) -> tuple[tuple[Any, ...], Tensor | None, tuple[bool, ...]]:
        """The rule's numbers: with 0 in place of those on the device, these, and which they are."""
        numbers = rule.scalars(**hyper)
        return (numbers, None, ()) if _NUMBERS.issuperset(map(type, numbers)) else self._numbers_apart(numbers)

    def _numbers_apart(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], Tensor | None, tuple[bool, ...]]:
        """Numbers of which some are tensors: with 0 in place of those on the device, these, and which they are."""
        here = tuple(self._here(value) for value in values)
        marks = tuple(isinstance(value, Tensor) for value in here)
        on_device = [value.double().reshape(()) for value in here if isinstance(value, Tensor)]
        numbers = tuple(0.0 if mark else value for value, mark in zip(here, marks, strict=True))
        return numbers, torch.stack(on_device).float() if on_device else None, marks

    def _here(self, value: Any) -> Any:
        """A number, or a tensor on this device: one on the CPU is read, which waits for nothing."""
        if isinstance(value, Tensor) and value.device != self.device:
            return float(value) if value.device.type == "cpu" else value.to(self.device)
        return value
