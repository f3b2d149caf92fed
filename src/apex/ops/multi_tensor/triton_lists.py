"""Tensor lists on a GPU: a rule is one launch over address tables."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _device
from . import config
from .rule import FLAG_COUNT, GRADIENT, SCALARS, SLOTS, Rule, padded
from .tables import AddressTable, Layout, keep_if_captured, upload

if TYPE_CHECKING:
    from .._launch import BoundLaunch

Slots = Sequence[Sequence[Tensor] | None]

_data_ptr = Tensor.data_ptr


@functools.cache
def _kernels() -> ModuleType:
    """The kernels, imported at first use: importing apex needs no Triton."""
    from . import kernels

    return kernels


@functools.cache
def _triton_type(dtype: torch.dtype | None) -> Any:
    import triton.language as tl

    return None if dtype is None else getattr(tl, str(dtype).removeprefix("torch."))


def current_stream(device: torch.device) -> int:
    """The handle of the stream that work on `device` goes to; 0 on the CPU."""
    if device.type != "cuda":
        return 0
    return torch._C._cuda_getCurrentRawStream(torch.cuda.current_device() if device.index is None else device.index)


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
        self._block = config.block(_device.facts(self.device), sum(dtype is not None for dtype in self.types))
        self._table = AddressTable(self.sizes, self.device)
        self._launches: dict[Any, BoundLaunch] = {}
        self._whole_bounds: dict[int, Tensor] = {}
        self.point_to(slots, copy)

    @functools.cached_property
    def _layout(self) -> Layout:
        """A program per block."""
        return Layout(self.sizes, self._block, self.device)

    @functools.cached_property
    def _measuring(self) -> Layout:
        """A program per so many blocks that what they measure takes little memory."""
        blocks = sum(-(-size // self._block) for size in self.sizes)
        together = config.blocks_together(_device.facts(self.device), blocks)
        return self._layout if together == 1 else Layout(self.sizes, self._block * together, self.device)

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
        partials = self._run(rule, hyper, flags, noop, grad_scale, whole, overflow, culprits, checks, seed)
        return None if partials is None else self._per_tensor(rule, partials, noop)

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
    ) -> Tensor | None:
        """Launches the rule; returns what it measured in each block."""
        values = tuple(self._here(value) for value in rule.scalars(**hyper))
        on_device = [value for value in values if isinstance(value, Tensor)]
        scalars = torch.stack([value.double().reshape(()) for value in on_device]).float() if on_device else None
        marks = tuple(isinstance(value, Tensor) for value in values)
        floats = (
            tuple(0.0 if mark else value for value, mark in zip(values, marks, strict=True))
            if scalars is not None
            else values
        )
        layout = self._measuring if rule.quantities else self._layout
        partials = None
        if rule.quantities:
            partials = torch.empty(layout.count, rule.quantities, dtype=torch.float32, device=self.device)
        if layout.count:
            key = (
                rule,
                flags,
                marks,
                checks,
                seed is None,
                self._table.aligned,
                _type(noop),
                _type(grad_scale),
                whole is None,
                _type(overflow),
                culprits is None,
            )
            keep_if_captured(self.device, self._table.fixed, self._table.moving, layout.programs)
            launch = self._launches.get(key)
            if launch is None:
                launch = self._launches[key] = self._bind(rule, layout, flags, marks, checks, seed is not None)
            launch(
                self._table.fixed,
                self._table.moving,
                layout.programs,
                noop,
                grad_scale,
                scalars,
                whole,
                partials,
                overflow,
                culprits,
                floats=(*map(float, padded(floats, SCALARS, 0.0)), float(seed or 0)),
            )
        return partials

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
            self._block,
            layout.block // self._block,
        )
        return kernels.apply_rule.bind(
            (layout.count,), (0.0,) * (SCALARS + 1), constants, device=self.device, num_warps=config.WARPS
        )

    def _per_tensor(self, rule: Rule, partials: Tensor, noop: Tensor | None) -> Tensor:
        out = torch.empty(len(self.sizes), max(2, rule.quantities), dtype=torch.float32, device=self.device)
        self._reduce(partials, self._measuring.bounds, noop, out, rule.quantities, rule.maximum, root=False)
        return out

    def _reduce(
        self,
        partials: Tensor,
        bounds: Tensor,
        noop: Tensor | None,
        out: Tensor,
        quantities: int,
        maximum: bool,
        root: bool,
    ) -> None:
        grid = (bounds.numel() - 1, quantities)
        constants = (partials.shape[1], maximum, out.shape[-1], root, config.REDUCE_BLOCK)
        key = (grid, constants, _type(noop))
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = _kernels().reduce_partials.bind(
                grid, (), constants, device=self.device, num_warps=config.REDUCE_WARPS
            )
        keep_if_captured(self.device, bounds)
        launch(partials, bounds, noop, out)

    def total(self, per_tensor: Tensor, *, maximum: bool = False, root: bool = False) -> Tensor:
        """Sum (or maximum) over the tensors of the first quantity, float32 [1]; its root if asked for."""
        out = torch.empty(1, dtype=torch.float32, device=self.device)
        self._reduce(per_tensor, self._bounds_of_all(len(self.sizes)), None, out, 1, maximum, root)
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
        partials = self._run(rule, hyper, (), noop, grad_scale, None, overflow, None, checks, None)
        assert partials is not None
        if len(partials) > config.TOTAL_AT_ONCE:
            return self.total(self._per_tensor(rule, partials, noop), maximum=rule.maximum, root=root)
        out = torch.empty(1, dtype=torch.float32, device=self.device)
        self._reduce(partials, self._bounds_of_all(len(partials)), noop, out, 1, rule.maximum, root)
        return out

    def _bounds_of_all(self, count: int) -> Tensor:
        bounds = self._whole_bounds.get(count)
        if bounds is None:
            bounds = self._whole_bounds[count] = upload([0, count], torch.int32, self.device)
        return bounds


def _type(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype
