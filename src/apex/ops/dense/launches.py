"""From tensors to kernel launches: allocation, launch configuration, tensors in kernel order.

What depends on shapes and dtypes alone is planned once and cached.
"""

from __future__ import annotations

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
    num_warps: int
    num_stages: int


def activation_config(rows: int, columns: int, element_size: int, device: _device.DeviceFacts) -> ActivationConfig:
    block = min(256, 1 << max(4, (columns - 1).bit_length()))
    tile_rows = 8
    column_blocks = -(-columns // block)
    # Enough programs to fill the device a few times over, each with several tiles, so that few partial sums remain.
    wanted = -(-8 * device.multiprocessors // column_blocks)
    groups = max(1, min(wanted, -(-rows // (4 * tile_rows))))
    return ActivationConfig(tile_rows, block, groups, num_warps=4, num_stages=1)


class ActivationPlan:
    """The launches of one activation's backward pass."""

    def __init__(self, main: BoundLaunch, sum_groups: BoundLaunch | None, groups: int, columns: int) -> None:
        self._main = main
        self._sum_groups = sum_groups
        self._partials_shape = (groups, columns)

    def run(self, dy: Tensor, saved: Tensor | None, dz: Tensor | None) -> Tensor | None:
        """Fills `dz` and returns the bias gradient, where one was planned."""
        if self._sum_groups is None:
            self._main(dy, saved, dz, None)
            return None
        partials = torch.empty(self._partials_shape, dtype=torch.float32, device=dy.device)
        self._main(dy, saved, dz, partials)
        dbias = dy.new_empty(self._partials_shape[1])
        self._sum_groups(partials, dbias)
        return dbias


@functools.lru_cache(maxsize=4096)
def activation_plan(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    activation: str,
    bias_grad: bool,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> ActivationPlan:
    kernels = _kernels()
    chosen = activation_config(rows, columns, dtype.itemsize, facts)
    tiles = -(-rows // chosen.rows)
    rows_per_program = -(-tiles // chosen.groups) * chosen.rows
    groups = -(-rows // rows_per_program)
    full = columns % chosen.block == 0 and rows % chosen.rows == 0
    main = kernels.activation_backward.bind(
        (-(-columns // chosen.block), groups),
        (rows, columns, rows_per_program),
        (ACTIVATIONS.index(activation), bias_grad, chosen.rows, chosen.block, full, chosen.num_stages),
        device=device,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    sum_groups = None
    if bias_grad:
        sum_groups = kernels.sum_groups.bind(
            (-(-columns // 64),), (groups, columns), (32, 64), device=device, num_warps=4
        )
    return ActivationPlan(main, sum_groups, groups, columns)


def triton_activation_backward(
    dy: Tensor, saved: Tensor, activation: str, bias_grad: bool, in_place: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients before the activation and of the bias; the former takes the place of `dy` with `in_place`."""
    if not dy.is_contiguous():
        dy, in_place = dy.contiguous(), True
    if not saved.is_contiguous():
        saved = saved.contiguous()
    dz = dy if in_place else torch.empty_like(dy)
    rows, columns = dy.shape
    device = dy.device
    plan = activation_plan(rows, columns, dy.dtype, activation, bias_grad, device, _device.facts(device))
    return dz, plan.run(dy, saved, dz)


def triton_bias_gradient(dy: Tensor) -> Tensor | None:
    """The sum over rows."""
    if not dy.is_contiguous():
        dy = dy.contiguous()
    rows, columns = dy.shape
    device = dy.device
    return activation_plan(rows, columns, dy.dtype, "none", True, device, _device.facts(device)).run(dy, None, None)


@functools.lru_cache(maxsize=1024)
def _accumulation_plan(
    rows: int, outs: int, ins: int, dtype: torch.dtype, device: torch.device, facts: _device.DeviceFacts
) -> BoundLaunch:
    small = facts.backend == "interpreter" or min(outs, ins) < 128
    block_out, block_in, block_rows = (32, 32, 32) if small else (128, 128, 64)
    return _kernels().accumulate_weight_gradient.bind(
        (-(-outs // block_out) * -(-ins // block_in),),
        (rows, outs, ins),
        (block_out, block_in, block_rows, 8, facts.backend == "interpreter"),
        device=device,
        num_warps=4 if small else 8,
        num_stages=1 if small else (2 if facts.backend == "hip" else 3),
    )


def triton_accumulate(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    """d_weight += d_output^T input, all contiguous, the first in float32 and the others in one half precision."""
    (rows, ins), outs = input.shape, d_output.shape[1]
    device = input.device
    _accumulation_plan(rows, outs, ins, input.dtype, device, _device.facts(device))(d_output, input, d_weight)
