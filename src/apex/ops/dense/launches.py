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
from .._results import Maker, maker
from .._workspace import TICKETS, partial_sums_on
from .reference import ACTIVATIONS

if TYPE_CHECKING:
    from .._launch import BoundLaunch


@functools.cache
def _kernels() -> ModuleType:
    """Imported at first use: importing apex needs no Triton."""
    from . import kernels

    return kernels


# Elements of a matrix up to which few programs with many rows are quick enough: float16 4096x1024 in 17.7 us on an
# H200, 4096x4096 in 41 (two launches: 16.4 and 38, but twice the host time, 30 us instead of 15).
SMALL_MATRIX = 1 << 24
FEW_ROWS = 2048
# Programs that leave their sums to the last of them.
UNION = 32


@dataclass(frozen=True)
class ActivationConfig:
    """Tiles of `rows` by `block` elements, of which `stages` are on their way; `groups` programs share the rows of one
    block of columns."""

    rows: int
    block: int
    groups: int
    num_warps: int = 4
    stages: int = 1


def activation_config(rows: int, columns: int, device: _device.DeviceFacts) -> ActivationConfig:
    # Where a program for every 16 columns keeps half of the device busy or is soon done, it takes all of their rows:
    # one launch, and no sums to be added, which is what counts where the host is the limit.
    if (2 * columns >= 15 * device.multiprocessors or rows <= FEW_ROWS) and rows * columns <= SMALL_MATRIX:
        return ActivationConfig(min(256, max(16, _device.next_power_of_2(rows))), 16, 1, num_warps=8, stages=3)
    block = min(128, max(16, 1 << (columns - 1).bit_length()))
    column_blocks = -(-columns // block)
    # Eight programs per multiprocessor, but so few groups that their sums are quickly added: of many columns 64.
    # gelu float16 8192x16384 takes 209 us, 1.10 times the floor (tiles of 8 by 256: 252, PyTorch's two operators: 275),
    # relu 4096x1024 takes 17 (PyTorch: 23), relu 512x512 takes 8 (PyTorch: 16).
    groups = min(64 if column_blocks > 4 else 512, -(-8 * device.multiprocessors // column_blocks), -(-rows // 16))
    return ActivationConfig(16, block, groups)


class ActivationPlan:
    """The launches of one activation's backward pass, for contiguous matrices of one shape and dtype."""

    def __init__(
        self,
        main: BoundLaunch,
        sum_groups: BoundLaunch | None,
        dbias: Maker | None,
        partials: int,
        device: torch.device,
    ) -> None:
        self._main, self._sum_groups = main, sum_groups
        self._dbias, self._partials = dbias, partials
        self._device = device

    def run(self, dy: Tensor, saved: Tensor, dz: Tensor) -> Tensor | None:
        """Fills `dz`, which may be `dy`, and returns the bias gradient, where one was planned."""
        stream = _device.stream_here(self._device.index)
        dbias = None if self._dbias is None else self._dbias(stream)
        self.fill(stream, dy, saved, dz, dbias)
        return dbias

    def fill(self, stream: int | None, dy: Tensor, saved: Tensor, dz: Tensor, dbias: Tensor | None) -> None:
        """The same for a caller that has a place for the bias gradient and knows what `stream_here` says."""
        if not self._partials:
            self._main(dy, saved, dz, dbias, None, None, stream=stream)
            return
        partials, tickets = partial_sums_on(stream, self._partials, self._device)
        if self._sum_groups is None:
            self._main(dy, saved, dz, partials, tickets, dbias, stream=stream)
            return
        self._main(dy, saved, dz, partials, None, None, stream=stream)
        self._sum_groups(partials, dbias, stream=stream)


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
    blocks, unions = -(-columns // chosen.block), -(-groups // UNION)
    partials = groups > 1 and bias_grad
    finish = partials and facts.publishes_for_all and blocks * (1 + unions) <= TICKETS
    main = _kernels().activation_backward.bind(
        (blocks, groups),
        (rows, columns, rows_per_program),
        (
            *(ACTIVATIONS.index(activation), bias_grad, chosen.rows, chosen.block, chosen.stages, full),
            UNION if finish else 0,
        ),
        device=device,
        num_warps=chosen.num_warps,
    )
    sum_groups = None
    if partials and not finish:
        sum_groups = _kernels().sum_groups.bind(
            (-(-columns // 64),), (groups, columns), (32, 64), device=device, num_warps=4
        )
    dbias = maker((columns,), dtype, device) if bias_grad else None
    return ActivationPlan(main, sum_groups, dbias, (groups + unions) * columns if partials else 0, device)


def activation_plan(
    like: Tensor, activation: str, bias_grad: bool, shape: tuple[int, int] | None = None
) -> ActivationPlan:
    """The plan for gradients like `like`, a matrix with elements, or what is one of `shape` in memory."""
    rows, columns = shape or like.shape
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


@functools.lru_cache(maxsize=1024)
def _gelu_plan(elements: int, dtype: torch.dtype, device: torch.device) -> BoundLaunch:
    # 8192x16384 float16 in 131 us (4100 GB/s); 8192 elements per program: 134, PyTorch's operator: 157.
    block = 2048
    return _kernels().gelu_forward.bind(
        (-(-elements // block),), (elements,), (block, elements % block == 0), device=device, num_warps=4
    )


def triton_gelu(input: Tensor) -> Tensor:
    if not input.is_contiguous():
        input = input.contiguous()
    output = torch.empty_like(input)
    _gelu_plan(input.numel(), input.dtype, input.device)(input, output)
    return output


@functools.lru_cache(maxsize=1024)
def _accumulation_plan(
    rows: int, outs: int, ins: int, dtype: torch.dtype, device: torch.device, facts: _device.DeviceFacts
) -> BoundLaunch:
    # 8192x4096x4096 bfloat16 in 499 us (tiles of 128 by 128, masked: 781; PyTorch's product: 362).
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
