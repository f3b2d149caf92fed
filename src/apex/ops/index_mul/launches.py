"""From tensors to kernel launches: launch configuration, allocation, tensors in kernel order.

What depends on shapes and dtypes alone is planned once and cached; a call then allocates its results and launches.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _device

if TYPE_CHECKING:
    from .._launch import BoundLaunch

# Rows of in1 that are cleared, or partial sums that are added, at a time.
FINISH_ROWS = 16


@dataclass(frozen=True)
class Tile:
    """What one program works on at a time: `rows` rows or chunks, `block` columns wide."""

    rows: int
    block: int
    num_warps: int


def _tile(width: int, elements: int, per_thread: int, device: _device.DeviceFacts) -> Tile:
    block = min(1024, 1 << max(0, width - 1).bit_length())
    rows = max(1, elements // block)
    return Tile(rows, block, max(1, min(512, rows * block // per_thread) // device.warp_size))


def forward_tile(width: int, device: _device.DeviceFacts) -> Tile:
    return _tile(width, 1024, 8, device)


def backward_tile(width: int, device: _device.DeviceFacts) -> Tile:
    return _tile(width, 512, 4, device)


def backward_steps(count: int, device: _device.DeviceFacts) -> int:
    """Sorted positions per chunk: many leave few partial sums to add, as long as there are chunks for all.

    800000x256 of 200000 rows: 728 and 24 us to finish with 128, 721 and 63 with 32.
    """
    return 128 if count >= 128 * 16 * device.multiprocessors else 32


@functools.lru_cache(maxsize=4096)
def _forward_plan(
    count: int,
    in1_rows: int,
    width: int,
    in1_dtype: torch.dtype,
    in2_dtype: torch.dtype,
    index_dtype: torch.dtype,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> BoundLaunch:
    from . import kernels  # at first use: importing apex needs no Triton

    tile = forward_tile(width, facts)
    column_blocks = -(-width // tile.block)
    return kernels.index_mul_forward.bind(
        (-(-count // tile.rows) * column_blocks,),
        (count, in1_rows, width, column_blocks),
        (tile.rows, tile.block, count % tile.rows == 0 and width % tile.block == 0),
        device=device,
        num_warps=tile.num_warps,
    )


def triton_forward(in1: Tensor, in2: Tensor, index: Tensor) -> Tensor:
    """in1[index] * in2 for an in2 that has elements."""
    in1, in2, index = in1.contiguous(), in2.contiguous(), index.contiguous()
    count, width = in2.shape
    device = in2.device
    launch = _forward_plan(count, in1.shape[0], width, in1.dtype, in2.dtype, index.dtype, device, _device.facts(device))
    out = torch.empty_like(in2)
    launch(in1, in2, index, out)
    return out


@dataclass(frozen=True)
class BackwardPlan:
    """The launches of one backward pass; `partials` is the shape of the sums between them."""

    main: BoundLaunch
    finish: BoundLaunch
    partials: tuple[int, int]


@functools.lru_cache(maxsize=4096)
def _backward_plan(
    count: int,
    in1_rows: int,
    width: int,
    need2: bool,
    twice: bool,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> BackwardPlan:
    from . import kernels

    tile = backward_tile(width, facts)
    column_blocks = -(-width // tile.block)
    steps = backward_steps(count, facts)
    chunks = -(-count // steps)
    main = kernels.index_mul_backward.bind(
        (-(-chunks // tile.rows) * column_blocks,),
        (count, in1_rows, width, column_blocks),
        (need2, twice, tile.rows, steps, tile.block),
        device=device,
        num_warps=tile.num_warps,
    )
    finish = kernels.index_mul_finish.bind(
        (max(chunks, -(-in1_rows // FINISH_ROWS)) * column_blocks,),
        (count, in1_rows, width, column_blocks),
        (steps, FINISH_ROWS, tile.block),
        device=device,
        num_warps=max(1, min(512, FINISH_ROWS * tile.block // 16) // facts.warp_size),
    )
    return BackwardPlan(main, finish, (2 * chunks, width))


def triton_backward(
    grad_out: Tensor,
    in1: Tensor,
    in2: Tensor,
    index: Tensor,
    need2: bool,
    grad_grad1: Tensor | None = None,
    grad_grad2: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of in1, in2 and (given those of these gradients) of grad_out, for an in2 that has elements."""
    count, width = in2.shape
    in1_rows = in1.shape[0]
    device = in2.device
    twice = grad_grad1 is not None
    plan = _backward_plan(
        count, in1_rows, width, need2, twice, in2.dtype, grad_out.dtype, device, _device.facts(device)
    )
    keys, order = torch.sort(index.to(torch.int32), stable=True)
    rows = torch.arange(in1_rows + 1, dtype=torch.int32, device=device)
    offsets = torch.searchsorted(keys, rows, out_int32=True)
    grad1 = torch.empty_like(in1, memory_format=torch.contiguous_format)
    grad2 = torch.empty_like(in2, memory_format=torch.contiguous_format) if need2 else None
    grad_grad_out = torch.empty_like(grad_out, memory_format=torch.contiguous_format) if twice else None
    partials = torch.empty(plan.partials, dtype=torch.float32, device=device)
    given = (t if t is None else t.contiguous() for t in (grad_out, in1, in2, grad_grad1, grad_grad2))
    plan.main(*given, keys, order, offsets, grad1, grad2, grad_grad_out, partials)
    plan.finish(keys, offsets, partials, grad1)
    return grad1, grad2, grad_grad_out
