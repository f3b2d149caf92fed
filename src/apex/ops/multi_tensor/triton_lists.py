"""Tensor lists on a GPU: a rule is one launch over address tables."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _device
from . import config, rules
from .rule import FLAG_COUNT, GRADIENT, SCALARS, SLOTS, Rule, padded
from .tables import AddressTable, Layout, current_stream, is_captured, keep_if_captured, upload

if TYPE_CHECKING:
    from .._launch import BoundLaunch

Slots = Sequence[Sequence[Tensor] | None]

_data_ptr = Tensor.data_ptr
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


class TritonLists:
    """Lists of dense tensors on one device, one dtype per list, whose tensors of equal index share their layout.

    `slots` has a list or None for each slot of a rule; `copy` gets a copy of what is written to slot 0.
    """

    def __init__(self, slots: Slots, copy: Sequence[Tensor] | None = None) -> None:
        first = next(tensors for tensors in slots if tensors)
        self.device = first[0].device
        self.stream = current_stream(self.device)
        lists = (*slots, copy)
        self.types = tuple(tensors[0].dtype if tensors else None for tensors in lists)
        self.sizes = tuple(tensor.numel() for tensor in first)
        self._table = AddressTable(self.sizes, self.device)
        self._begin()
        self.point_to(slots, copy)

    def _begin(self) -> None:
        self._layouts: dict[Any, Layout] = {}
        self._launches: dict[Any, tuple[BoundLaunch, Layout]] = {}
        self._reductions: dict[Any, BoundLaunch] = {}
        self._whole_bounds: dict[int, Tensor] = {}
        self._scratches: dict[tuple[tuple[int, ...], int], Tensor] = {}

    def _block_for(self, lists: int) -> int:
        """Elements of each of so many lists that a program handles at once."""
        return config.block(_device.facts(self.device), lists)

    def _blocks_together(self, block: int) -> int:
        """How many blocks a program that measures walks over."""
        return config.blocks_together(_device.facts(self.device), sum(-(-size // block) for size in self.sizes))

    def _layout(self, rule: Rule) -> Layout:
        """A program per block; or, of a rule that measures, per so many that what they find takes little memory."""
        copied = self.types[SLOTS] is not None and 0 in rule.writes
        block = self._block_for(len(rule.slots) + copied)
        together = self._blocks_together(block) if rule.quantities else 1
        layout = self._layouts.get((block, together))
        if layout is None:
            layout = self._layouts[block, together] = Layout(self.sizes, block, self.device, together)
        return layout

    def point_to(self, slots: Slots, copy: Sequence[Tensor] | None = None) -> None:
        """Other tensors of the same sizes and dtypes in place of the present ones."""
        fixed = [list(map(_data_ptr, tensors)) for slot, tensors in enumerate(slots) if slot != GRADIENT and tensors]
        if copy is not None:
            fixed.append(list(map(_data_ptr, copy)))
        gradients = slots[GRADIENT]
        self._table.update_fixed(fixed)
        self._table.update_moving(None if gradients is None else list(map(_data_ptr, gradients)))

    def points_to(self, fixed: list[list[int]], gradients: list[int] | None) -> bool:
        """Whether these are the addresses of the present tensors: of each list but the gradients', and of those."""
        return self._table.holds(fixed, gradients)

    @property
    def uploads(self) -> int:
        """How often addresses were uploaded: as long as it stays the same, the tensors do."""
        return self._table.uploads

    def move_gradients(self, addresses: list[int]) -> None:
        """Other gradients, given their addresses."""
        self._table.update_moving(addresses)

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
        culprits: Tensor | None = None,
        checks: tuple[int, ...] = (),
        seed: int | None = None,
    ) -> Tensor | None:
        """Runs `rule`; returns what it measured, float32 [tensors, 2 or more]. See `TorchLists.apply`."""
        partials, layout = self._run(rule, hyper, flags, noop, grad_scale, whole, overflow, culprits, checks, seed)
        return None if partials is None else self._per_tensor(rule, partials, layout, noop)

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
        numbers = rule.scalars(**hyper)
        scalars: Tensor | None = None
        marks: tuple[bool, ...] = ()
        if not _NUMBERS.issuperset(map(type, numbers)):
            numbers, scalars, marks = self._numbers_apart(numbers)
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

    def _scratch(self, shape: tuple[int, ...]) -> Tensor:
        """Memory for numbers that the next launch on this stream reads, and no later one.

        The same each time, because to ask for it takes as long as half a launch; but a CUDA graph has its own.
        """
        if is_captured(self.device):
            return torch.empty(shape, dtype=torch.float32, device=self.device)
        key = shape, current_stream(self.device)
        memory = self._scratches.get(key)
        if memory is None:
            memory = self._scratches[key] = torch.empty(shape, dtype=torch.float32, device=self.device)
        return memory

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

    def _bind(
        self,
        rule: Rule,
        layout: Layout,
        flags: tuple[bool, ...],
        marks: tuple[bool, ...],
        checks: tuple[int, ...],
        stochastic: bool,
    ) -> BoundLaunch:
        kernels = _kernels()
        constants = (
            kernels.compiled(rule),
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
            stochastic,
            layout.block,
            layout.together,
        )
        return kernels.apply_rule.bind(
            (layout.count,), (0.0,) * (SCALARS + 1), constants, device=self.device, num_warps=config.WARPS
        )

    def _per_tensor(self, rule: Rule, partials: Tensor, layout: Layout, noop: Tensor | None) -> Tensor:
        out = torch.empty((len(self.sizes), max(2, rule.quantities)), dtype=torch.float32, device=self.device)
        self._reduce(partials, layout.bounds, out, noop=noop, quantities=rule.quantities, maximum=rule.maximum)
        return out

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

    def lamb(
        self,
        hyper: dict[str, Any],
        flags: tuple[bool, ...],
        *,
        noop: Tensor | None = None,
        grad_scale: Tensor | None = None,
        seed: int | None = None,
    ) -> None:
        """A step of LAMB, whose length per tensor the first pass measures for the second. FLAGS: decoupled decay."""
        found = self.apply(rules.LAMB_MOMENTS, hyper, flags, noop=noop, grad_scale=grad_scale)
        self.apply(rules.LAMB_STEP, hyper, flags, noop=noop, whole=found, seed=seed)

    def total(self, per_tensor: Tensor, *, maximum: bool = False, root: bool = False) -> Tensor:
        """Sum (or maximum) over the tensors of the first quantity, float32 [1]; its root if asked for."""
        out = torch.empty(1, dtype=torch.float32, device=self.device)
        self._reduce(per_tensor, self._bounds_of_all(len(self.sizes)), out, maximum=maximum, root=root)
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
        partials = self._measured_in_parts(rule, hyper, noop, grad_scale, overflow, checks)
        out = torch.empty(1, dtype=torch.float32, device=self.device)
        self._reduce(partials, self._bounds_of_all(partials.shape[0]), out, noop=noop, maximum=rule.maximum, root=root)
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

        The factor is overwritten by the next call.
        `rule` measures squares, or absolute values that are maximised. See `kernels_reductions.reduce_partials`.
        """
        partials = self._measured_in_parts(rule, {}, noop, grad_scale, None, ())
        norm = torch.empty(1, dtype=torch.float32, device=self.device)
        factor = self._scratch((1,))
        self._reduce(
            partials,
            self._bounds_of_all(partials.shape[0]),
            norm,
            noop=noop,
            maximum=rule.maximum,
            root=not rule.maximum,
            grad_scale=grad_scale,
            clip=(factor, limit, margin),
        )
        return norm, factor

    def _measured_in_parts(
        self,
        rule: Rule,
        hyper: dict[str, Any],
        noop: Tensor | None,
        grad_scale: Tensor | None,
        overflow: Tensor | None,
        checks: tuple[int, ...],
    ) -> Tensor:
        """What a rule that measures one quantity found, so many parts that one program adds them up: [parts, ...]."""
        partials, layout = self._run(rule, hyper, (), noop, grad_scale, None, overflow, None, checks, None)
        assert partials is not None
        return self._per_tensor(rule, partials, layout, noop) if layout.count > config.TOTAL_AT_ONCE else partials

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
        partials, layout = self._run(rule, {}, (), noop, grad_scale, None, None, None, (), None)
        assert partials is not None
        self._reduce(partials, layout.bounds, averages, noop=noop, maximum=rule.maximum, share=share)

    def _bounds_of_all(self, count: int) -> Tensor:
        bounds = self._whole_bounds.get(count)
        if bounds is None:
            bounds = self._whole_bounds[count] = upload([0, count], torch.int32, self.device)
        return bounds
