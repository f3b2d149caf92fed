"""From tensors to kernel launches: allocation, launch configuration, tensors in kernel order.

What depends on shapes and dtypes alone is planned once and cached.
"""

from __future__ import annotations

import contextvars
import functools
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _device
from .reference import ACTIVATIONS

if TYPE_CHECKING:
    from .._launch import BoundLaunch


@functools.cache
def _kernels() -> ModuleType:
    """Imported at first use: importing apex needs no Triton."""
    from . import kernels

    return kernels


@dataclass(frozen=True)
class ActivationConfig:
    """Tiles of `rows` by `block` elements; `groups` programs share the rows of one block of columns."""

    rows: int
    block: int
    groups: int


def activation_config(rows: int, columns: int, device: _device.DeviceFacts) -> ActivationConfig:
    block = min(128, max(16, 1 << (columns - 1).bit_length()))
    column_blocks = -(-columns // block)
    # Eight programs per multiprocessor, but so few groups that their sums are quickly added.
    groups = min(64, -(-8 * device.multiprocessors // column_blocks), -(-rows // 16))
    return ActivationConfig(16, block, groups)


class ActivationPlan:
    """The launches of one activation's backward pass, for contiguous matrices of one shape and dtype."""

    def __init__(self, main: BoundLaunch, sum_groups: BoundLaunch | None, groups: int, columns: int) -> None:
        self._main = main
        self._sum_groups = sum_groups
        self._partials_shape = (groups, columns)
        self._columns = columns

    def run(self, dy: Tensor, saved: Tensor, dz: Tensor) -> Tensor | None:
        """Fills `dz`, which may be `dy`, and returns the bias gradient, where one was planned."""
        if self._sum_groups is None:
            self._main(dy, saved, dz, None)
            return None
        partials = torch.empty(self._partials_shape, dtype=torch.float32, device=dy.device)
        self._main(dy, saved, dz, partials)
        dbias = dy.new_empty(self._columns)
        self._sum_groups(partials, dbias)
        return dbias


@functools.lru_cache(maxsize=4096)
def _activation_plan(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    activation: str,
    bias_grad: bool,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> ActivationPlan:
    chosen = activation_config(rows, columns, facts)
    tiles = -(-rows // chosen.rows)
    rows_per_program = -(-tiles // chosen.groups) * chosen.rows
    groups = -(-rows // rows_per_program)
    full = columns % chosen.block == 0 and rows % chosen.rows == 0
    main = _kernels().activation_backward.bind(
        (-(-columns // chosen.block), groups),
        (rows, columns, rows_per_program),
        (ACTIVATIONS.index(activation), bias_grad, chosen.rows, chosen.block, full),
        device=device,
        num_warps=4,
    )
    sum_groups = _sum_groups(groups, columns, device) if bias_grad else None
    return ActivationPlan(main, sum_groups, groups, columns)


def _sum_groups(groups: int, columns: int, device: torch.device) -> BoundLaunch:
    return _kernels().sum_groups.bind((-(-columns // 64),), (groups, columns), (32, 64), device=device, num_warps=4)


def activation_plan(like: Tensor, activation: str, bias_grad: bool) -> ActivationPlan:
    """The plan for gradients like `like`, a matrix with elements."""
    rows, columns = like.shape
    device = like.device
    return _activation_plan(rows, columns, like.dtype, activation, bias_grad, device, _device.facts(device))


def triton_activation_backward(
    dy: Tensor, saved: Tensor, activation: str, bias_grad: bool, in_place: bool, plan: ActivationPlan | None = None
) -> tuple[Tensor, Tensor | None]:
    """Gradients before the activation and of the bias; the former takes the place of `dy` with `in_place`."""
    if not dy.is_contiguous():
        dy, in_place = dy.contiguous(), True
    if not saved.is_contiguous():
        saved = saved.contiguous()
    if plan is None:
        plan = activation_plan(dy, activation, bias_grad)
    dz = dy if in_place else torch.empty_like(dy)
    return dz, plan.run(dy, saved, dz)


@dataclass(frozen=True)
class ProductConfig:
    """Tiles of the product and how it is walked."""

    block_rows: int
    block_columns: int
    block_depth: int
    band: int
    num_warps: int
    num_stages: int


def product_config(device: _device.DeviceFacts) -> ProductConfig:
    if device.shared_memory < 200 * 1024:  # not measured: compiles everywhere, and keeps the interpreter quick
        return ProductConfig(64, 64, 32, band=8, num_warps=4, num_stages=2)
    return ProductConfig(128, 256, 64, band=8, num_warps=8, num_stages=3)


class ProductPlan:
    """The launches of a matrix product with gelu in its epilogue."""

    def __init__(self, main: BoundLaunch, sum_groups: BoundLaunch | None, groups: int, shape: tuple[int, int]) -> None:
        self._main = main
        self._sum_groups = sum_groups
        self._groups = groups
        self._shape = shape

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None, keep: bool) -> tuple[Tensor, Tensor | None]:
        """gelu of the layer's output, and with `keep` that output itself."""
        active = input.new_empty(self._shape)
        hidden = torch.empty_like(active) if keep else None
        _with_scratch_memory(self._main, input, weight, bias, hidden, active)
        return active, hidden

    def backward(self, dy: Tensor, weight: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gradient before gelu, and that of the bias where one was planned."""
        dhidden = torch.empty_like(hidden)
        if self._sum_groups is None:
            _with_scratch_memory(self._main, dy, weight, None, hidden, dhidden)
            return dhidden, None
        columns = self._shape[1]
        partials = torch.empty((self._groups, columns), dtype=torch.float32, device=dy.device)
        _with_scratch_memory(self._main, dy, weight, partials, hidden, dhidden)
        dbias = dy.new_empty(columns)
        self._sum_groups(partials, dbias)
        return dhidden, dbias


def _with_scratch_memory(launch: BoundLaunch, *tensors: Tensor | None) -> None:
    """Launches a kernel that makes tensor descriptors, for which Triton asks an allocator for memory.

    The allocator is set for this launch alone, whatever thread it runs in.
    """

    def run() -> None:
        from triton import set_allocator

        set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=launch.device))
        launch(*tensors)

    contextvars.copy_context().run(run)


@functools.lru_cache(maxsize=1024)
def product_plan(
    rows: int,
    columns: int,
    depth: int,
    dtype: torch.dtype,
    backward: bool,
    bias: bool,
    keep: bool,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> ProductPlan:
    """The plan for `rows` x `depth` times `depth` x `columns`; `bias` says whether it (or its gradient) takes part."""
    from . import kernels_product

    chosen = product_config(facts)
    tiles_down = -(-rows // chosen.block_rows)
    programs = min(facts.multiprocessors, tiles_down * -(-columns // chosen.block_columns))
    blocks = (chosen.block_rows, chosen.block_columns, chosen.block_depth)
    main = kernels_product.gelu_product.bind(
        (programs,),
        (rows, columns, depth),
        (backward, bias, keep, *blocks, chosen.band, programs, facts.backend == "interpreter"),
        device=device,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    sum_groups = _sum_groups(tiles_down, columns, device) if backward and bias else None
    return ProductPlan(main, sum_groups, tiles_down, (rows, columns))


@functools.lru_cache(maxsize=1024)
def _accumulation_plan(
    rows: int, outs: int, ins: int, dtype: torch.dtype, device: torch.device, facts: _device.DeviceFacts
) -> BoundLaunch:
    small = facts.backend == "interpreter" or min(outs, ins) < 256
    large_tile = facts.shared_memory >= 160 * 1024
    block_out, block_in, block_rows = (32, 32, 32) if small else (128, 256 if large_tile else 128, 64)
    full = outs % block_out == 0 and ins % block_in == 0 and rows % block_rows == 0
    return _kernels().accumulate_weight_gradient.bind(
        (-(-outs // block_out) * -(-ins // block_in),),
        (rows, outs, ins),
        (block_out, block_in, block_rows, 8, full, facts.backend == "interpreter"),
        device=device,
        num_warps=4 if small else 8,
        num_stages=1 if small else (2 if facts.backend == "hip" else 3),
    )


def triton_accumulate(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    """d_weight += d_output^T input, all contiguous, the first in float32 and the others in one half precision."""
    (rows, ins), outs = input.shape, d_output.shape[1]
    device = input.device
    _accumulation_plan(rows, outs, ins, input.dtype, device, _device.facts(device))(d_output, input, d_weight)
