"""From tensors to kernel launches: what depends on shapes, strides and dtypes alone is planned once and cached."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import _device
from . import config
from .spec import DIMENSIONS, RopeSpec, Signature, Sizes, checked_sizes, empty_result, memory_is_swapped

if TYPE_CHECKING:
    from .._launch import BoundLaunch


@functools.cache
def _kernels() -> Any:
    """Imported at first use: importing apex needs no Triton."""
    from . import kernels

    return kernels


class _Side(NamedTuple):
    """One tensor of a launch: how it is cut into tiles, and its numbers in kernel order."""

    tile: config.Tile
    programs: int
    numbers: tuple[int, ...]
    unit: int

    @property
    def constants(self) -> tuple[Any, ...]:
        return self.tile.tokens, self.tile.heads, self.tile.full, self.unit


def _side(sizes: Sizes, strides: tuple[int, ...], spec: RopeSpec, itemsize: int, facts: _device.DeviceFacts) -> _Side:
    token_dim, batch_dim, head_dim = DIMENSIONS[spec.layout]
    tokens, batch, heads, channels = sizes[:4]
    out_strides = _result_strides(sizes, spec)
    source = [strides[token_dim], 0 if batch_dim is None else strides[batch_dim], strides[head_dim]]
    target = [out_strides[token_dim], 0 if batch_dim is None else out_strides[batch_dim], out_strides[head_dim]]
    # Batch entries that follow each other in memory are as good as more heads.
    if batch == 1 or all(side[1] == heads * side[2] for side in (source, target)):
        batch, heads = 1, batch * heads
        source[1] = target[1] = 0
    elif heads == 1:
        batch, heads = 1, batch
        source[1:], target[1:] = [0, source[1]], [0, target[1]]
    tile = config.tile(tokens, heads, channels, itemsize, facts, is_image=spec.layout == "image")
    # Triton knows of an integer that it is a multiple of 16, or nothing; counted in eights, strides that are multiples
    # of 8 only (heads of 72 channels) leave loads as wide as they can be.
    unit = min(8, math.gcd(*source, *target) & -math.gcd(*source, *target))
    if all(stride % 16 == 0 for stride in (*source, *target)):
        unit = 1
    strides_in_units = [stride // unit for stride in source], [stride // unit for stride in target]
    numbers = (batch, heads, *strides_in_units[0], strides[-1], *strides_in_units[1])
    return _Side(tile, tile.programs(tokens, batch, heads), numbers, unit)


def _result_strides(sizes: Sizes, spec: RopeSpec) -> tuple[int, ...]:
    """Strides of `spec.empty_result`."""
    tokens, batch, heads, channels = sizes[:4]
    row = heads * channels
    if spec.layout == "thd":
        return row, channels, 1
    first, second = (tokens, batch) if spec.layout == "sbhd" else (batch, tokens)
    return (row, first * row, channels, 1) if spec.swap_memory else (second * row, row, channels, 1)


def _shared_arguments(
    sizes: Sizes, tables: Sequence[Signature], from_angles: bool, cu_seqlens: Signature | None, spec: RopeSpec
) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """Numbers and constants that do not depend on heads and strides."""
    kernels = _kernels()
    positions = {"thd": kernels.PACKED, "image": kernels.IMAGE}.get(spec.layout, kernels.BY_INDEX).value
    half = sizes.rotated // 2
    # What is copied goes with what is rotated where it comes in chunks of the same size.
    chunks = sizes.channels // half if sizes.rest % half == 0 else 2 * sizes.parts
    rest = sizes.channels - chunks * half
    table_rows = math.prod(tables[0][0]) // sizes.rotated
    sequences_or_width = spec.width if cu_seqlens is None else cu_seqlens[0][0] - 1
    numbers = (sizes.tokens, table_rows, sequences_or_width, sequences_or_width.bit_length())
    return numbers, (
        positions,
        from_angles,
        spec.inverse,
        2 * sizes.parts,
        chunks,
        config.next_power_of_2(chunks),
        half,
        config.next_power_of_2(half),
        rest,
        config.next_power_of_2(rest) if rest else 0,
    )


class Plan:
    """The launch for tensors of one shape: of one of them, or of two that share their tables."""

    def __init__(
        self,
        launch: BoundLaunch,
        swap_memory: bool,
        tables: int,
        to_cosines: bool,
        result_strides: tuple[tuple[int, ...], ...],
        inverse_specs: list[RopeSpec],
        inverse: Callable[[RopeSpec], Plan | None],
    ) -> None:
        self._launch = launch
        self._swap_memory = swap_memory
        self._absent = (None,) * (4 - tables)
        self._to_cosines = to_cosines
        self.result_strides = result_strides
        self.inverse_specs = inverse_specs
        self._inverse = inverse

    @functools.cached_property
    def inverse(self) -> Plan | None:
        """The plan that takes gradients with the strides of the results back to the memory order of the inputs.

        None where the inputs differ in that.
        """
        first = self.inverse_specs[0]
        return self._inverse(first) if self.inverse_specs[-1] == first else None

    def run(self, tensors: tuple[Tensor, ...], tables: Sequence[Tensor], cu_seqlens: Tensor | None) -> list[Tensor]:
        """The rotated tensors."""
        if self._to_cosines:
            tables = _float_tables(tables)
        elif not all(map(Tensor.is_contiguous, tables)):
            tables = [table.contiguous() for table in tables]
        if cu_seqlens is not None and not cu_seqlens.is_contiguous():
            cu_seqlens = cu_seqlens.contiguous()
        swap = self._swap_memory
        results = [empty_result(tensor, swap) for tensor in tensors]
        self._launch(*tensors, *results, *tables, *self._absent, cu_seqlens)
        return results


def _float_tables(tables: Sequence[Tensor]) -> list[Tensor]:
    """Tables that the kernel takes, of some that have float64 among them: cosines of float64 angles stay exact."""
    if len(tables) == 1:
        tables = (tables[0].cos(), tables[0].sin())
    return [table.to(torch.float32).contiguous() for table in tables]


@functools.lru_cache(maxsize=4096)
def _plan(
    spec: RopeSpec,
    shapes: tuple[torch.Size, ...],
    strides: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
    tables: tuple[Signature, ...],
    cu_seqlens: Signature | None,
    facts: _device.DeviceFacts,
) -> Plan | None:
    """None where the kernel does not take such tensors."""
    sizes = [checked_sizes((shape, dtype, device), tables, cu_seqlens, spec) for shape in shapes]
    if not all(map(launchable, sizes)) or sizes[0]._replace(heads=0) != sizes[-1]._replace(heads=0):
        return None
    to_cosines = any(table[1] == torch.float64 for table in tables)
    tables_given = max(2, len(tables)) if to_cosines else len(tables)
    sides = [_side(*pair, spec, dtype.itemsize, facts) for pair in zip(sizes, strides, strict=True)]
    numbers, constants = _shared_arguments(sizes[0], tables, tables_given == 1, cu_seqlens, spec)
    programs = [side.programs for side in sides]
    if len(sides) == 2:
        numbers += (programs[0],)
    kernels = _kernels()
    kernel = kernels.rope if len(sides) == 1 else kernels.rope_pair
    launch = kernel.bind(
        (sum(programs),),
        (*numbers, *(number for side in sides for number in side.numbers)),
        (
            *constants,
            *(constant for side in sides for constant in side.constants),
        ),
        device=device,
        num_warps=max(side.tile.num_warps for side in sides),
    )
    results = tuple(_result_strides(size, spec) for size in sizes)
    return Plan(
        launch,
        spec.swap_memory,
        tables_given,
        to_cosines,
        results,
        [inverse_of(spec, shape, stride) for shape, stride in zip(shapes, strides, strict=True)],
        lambda back: _plan(back, shapes, results, dtype, device, tables, cu_seqlens, facts),
    )


def inverse_of(spec: RopeSpec, shape: Sequence[int], strides: tuple[int, ...]) -> RopeSpec:
    """What takes the gradient of a result back, to lie in memory as the tensor with this shape and strides does."""
    swap = memory_is_swapped(torch.empty_strided(shape, strides, dtype=torch.float32, device="meta"))
    return spec._replace(swap_memory=swap, inverse=not spec.inverse)


def launchable(sizes: Sizes) -> bool:
    return sizes.tokens * sizes.batch * sizes.heads > 0 and sizes.channels <= config.LONGEST_ROW


def plan(
    tensors: tuple[Tensor, ...], tables: Sequence[Tensor], spec: RopeSpec, cu_seqlens: Tensor | None
) -> Plan | None:
    """The plan for tensors like these, whose dtypes and devices are equal; None where there is no kernel for them."""
    first = tensors[0]
    device = first.device
    return _plan(
        spec,
        tuple(tensor.shape for tensor in tensors),
        tuple(tensor.stride() for tensor in tensors),
        first.dtype,
        device,
        tuple((table.shape, table.dtype, table.device) for table in tables),
        None if cu_seqlens is None else (cu_seqlens.shape, cu_seqlens.dtype, cu_seqlens.device),
        _device.facts(device),
    )
