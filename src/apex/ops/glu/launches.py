"""From tensors to kernel launches: launch configuration, allocation, tensors in kernel order.

What depends on shapes and dtypes alone is planned once and cached; a call then allocates its results and launches.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _device

if TYPE_CHECKING:
    from .._launch import BoundLaunch


@dataclass(frozen=True)
class Tile:
    """What one program works on at a time: `rows` x `block` elements of the output."""

    rows: int
    block: int
    num_warps: int
    num_stages: int = 1


def _tile(width: int, rows: int, elements: int, block: int, per_thread: int, device: _device.DeviceFacts) -> Tile:
    """A tile of about `elements`, at most `block` wide, and as narrow and low as the tensor."""
    block = min(block, 1 << max(0, width - 1).bit_length())
    while width % block and width % (block // 2) == 0 and block > 256:
        block //= 2  # without masks, as long as a tile's rows are still long
    tall = min(max(1, elements // block), 1 << max(0, rows - 1).bit_length())
    threads = min(max(device.warp_size, tall * block // per_thread), 512)
    return Tile(tall, block, max(1, threads // device.warp_size))


# Times of 16384x22016 bfloat16 on an H200, in microseconds.
def forward_tile(rows: int, width: int, device: _device.DeviceFacts) -> Tile:
    """One row of 1024 columns in 251.6, as without bias; two rows in 276, 2048 columns in 257, 4096 in 284."""
    return _tile(width, rows, 1024, 1024, 8, device)


def backward_tile(rows: int, width: int, element_size: int, bias_grad: bool, device: _device.DeviceFacts) -> Tile:
    """Without a bias's gradient 420, and as long with other tiles.

    With it, two programs per multiprocessor that load two tiles of four rows ahead: 452. Four programs that load none
    ahead: 471; one row at a time: 452 to 596, the best with 21 times as many sums to add afterwards.
    """
    if not bias_grad:
        return _tile(width, rows, 1024, 1024, 8, device)
    elements = 4096 * 2 // element_size
    tile = _tile(width, rows, elements, 1024, 16, device)
    # Three tensors are loaded ahead for two programs.
    ahead = min(2, (device.shared_memory // 2 - 8192) // (3 * tile.rows * tile.block * element_size))
    return dataclasses.replace(tile, num_stages=1 + max(0, ahead))


def backward_groups(tiles: int, column_blocks: int, device: _device.DeviceFacts) -> int:
    """How many programs share a block of columns where they sum the bias's gradient."""
    return max(1, min(tiles, 2 * device.multiprocessors // column_blocks))


@functools.lru_cache(maxsize=4096)
def _forward_plan(
    rows: int,
    width: int,
    activation: str,
    input_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> BoundLaunch:
    from . import kernels  # at first use: importing apex needs no Triton

    tile = forward_tile(rows, width, facts)
    column_blocks = -(-width // tile.block)
    full = rows % tile.rows == 0 and width % tile.block == 0
    return kernels.glu_forward.bind(
        (-(-rows // tile.rows) * column_blocks,),
        (rows, width, column_blocks),
        (activation, bias_dtype is not None, tile.rows, tile.block, full),
        device=device,
        num_warps=tile.num_warps,
    )


def triton_forward(input: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """The output for an input that has elements."""
    if not input.is_contiguous():
        input = input.contiguous()
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    *outer, columns = input.shape
    device = input.device
    launch = _forward_plan(
        input.numel() // columns,
        columns // 2,
        activation,
        input.dtype,
        None if bias is None else bias.dtype,
        device,
        _device.facts(device),
    )
    output = torch.empty(*outer, columns // 2, dtype=input.dtype, device=device)
    launch(input, bias, output)
    return output


@dataclass(frozen=True)
class BackwardPlan:
    """The launches of one backward pass; `partials` is the shape of the sums between them."""

    main: BoundLaunch
    sum_partials: BoundLaunch | None
    partials: tuple[int, int]


@functools.lru_cache(maxsize=4096)
def _backward_plan(
    rows: int,
    width: int,
    activation: str,
    bias_grad: bool,
    dy_dtype: torch.dtype,
    input_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> BackwardPlan:
    from . import kernels

    tile = backward_tile(rows, width, input_dtype.itemsize, bias_grad, facts)
    column_blocks = -(-width // tile.block)
    tiles = -(-rows // tile.rows)
    groups = backward_groups(tiles, column_blocks, facts) if bias_grad else tiles
    full = rows % tile.rows == 0 and width % tile.block == 0
    main = kernels.glu_backward.bind(
        (groups * column_blocks,),
        (rows, width, column_blocks, groups),
        (activation, bias_dtype is not None, bias_grad, tile.rows, tile.block, full, tile.num_stages),
        device=device,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    sum_partials = None
    if bias_grad:
        sum_partials = kernels.glu_sum_partials.bind(
            (-(-2 * width // 32),), (groups, 2 * width), (64, 32), device=device, num_warps=4
        )
    return BackwardPlan(main, sum_partials, (groups, 2 * width))


def triton_backward(
    dy: Tensor, input: Tensor, bias: Tensor | None, activation: str, bias_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of an input that has elements and of the bias."""
    if not dy.is_contiguous():
        dy = dy.contiguous()
    if not input.is_contiguous():
        input = input.contiguous()
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    columns = input.shape[-1]
    device = input.device
    plan = _backward_plan(
        input.numel() // columns,
        columns // 2,
        activation,
        bias_grad and bias is not None,
        dy.dtype,
        input.dtype,
        None if bias is None else bias.dtype,
        device,
        _device.facts(device),
    )
    dinput = torch.empty_like(input)
    if bias is None or plan.sum_partials is None:
        plan.main(dy, input, bias, dinput, None)
        return dinput, None
    partials = torch.empty(plan.partials, dtype=torch.float32, device=device)
    plan.main(dy, input, bias, dinput, partials)
    dbias = torch.empty_like(bias)
    plan.sum_partials(partials, dbias)
    return dinput, dbias
