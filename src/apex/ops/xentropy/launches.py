"""From tensors to kernel launches: allocation, launch configuration, tensors in kernel order.

What depends on shapes and dtypes alone is planned once and cached; a call then allocates its results and launches.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _device

if TYPE_CHECKING:
    from .._launch import BoundLaunch

# Elements between which the kernels' blocks begin (`kernels.ALIGNMENT`).
ALIGNMENT = 16


@dataclass(frozen=True)
class BlockConfig:
    """A block is `groups` accesses of 16 bytes by each of `lanes` threads; `splits` programs share a row."""

    groups: int
    lanes: int
    num_warps: int
    splits: int = 1


def forward_config(rows: int, classes: int, element_size: int, device: _device.DeviceFacts) -> BlockConfig:
    return _fitted(
        classes, element_size, groups=4, lanes=256 if rows >= 4 * device.multiprocessors else 1024, device=device
    )


def backward_config(rows: int, classes: int, element_size: int, device: _device.DeviceFacts) -> BlockConfig:
    return _fitted(classes, element_size, groups=2, lanes=256, device=device)


def _fitted(classes: int, element_size: int, groups: int, lanes: int, device: _device.DeviceFacts) -> BlockConfig:
    """Blocks of that size, or smaller ones for rows that would not fill them."""
    vector = 16 // element_size
    while groups > 1 and groups * lanes * vector > classes:
        groups //= 2
    while lanes > device.warp_size and lanes * vector > classes:
        lanes //= 2
    return BlockConfig(groups, lanes, lanes // device.warp_size)


@functools.cache
def _kernels() -> ModuleType:
    """Imported at first use: importing apex needs no Triton."""
    from . import kernels

    return kernels


@functools.lru_cache(maxsize=4096)
def _forward_launch(
    rows: int,
    classes: int,
    row_stride: int,
    dtype: torch.dtype,
    smoothing: float,
    padding_idx: int,
    gradient: bool,
    scale_stride: int,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> BoundLaunch:
    chosen = forward_config(rows, classes, dtype.itemsize, facts)
    edges = row_stride % ALIGNMENT != 0 or classes % ALIGNMENT != 0
    return _kernels().xentropy_forward.bind(
        (rows,),
        (row_stride, classes, padding_idx, scale_stride, float(smoothing)),
        (smoothing > 0, edges, gradient, chosen.groups, chosen.lanes, 16 // dtype.itemsize),
        device=device,
        num_warps=chosen.num_warps,
    )


def triton_forward(logits: Tensor, labels: Tensor, smoothing: float, padding_idx: int) -> tuple[Tensor, Tensor]:
    """Losses and logarithms of the sums of exponentials, of rows x classes."""
    logits = with_whole_rows(logits)
    device = logits.device
    rows, classes = logits.shape
    launch = _forward_launch(
        rows,
        classes,
        logits.stride(0),
        logits.dtype,
        smoothing,
        padding_idx,
        False,
        0,
        device,
        _device.facts(device),
    )
    losses = torch.empty(rows, dtype=torch.float32, device=device)
    log_sums = torch.empty(rows, dtype=torch.float32, device=device)
    launch(logits, labels.contiguous(), losses, log_sums, None)
    return losses, log_sums


def triton_forward_and_gradient(
    logits: Tensor, labels: Tensor, losses: Tensor, row_scale: Tensor | None, smoothing: float, padding_idx: int
) -> None:
    """Writes the losses, and over the logits their gradient times `row_scale`; every tensor has adjacent elements."""
    device = logits.device
    rows, classes = logits.shape
    launch = _forward_launch(
        rows,
        classes,
        logits.stride(0),
        logits.dtype,
        smoothing,
        padding_idx,
        True,
        0 if row_scale is None else 1,
        device,
        _device.facts(device),
    )
    launch(logits, labels, losses, torch.empty_like(losses), row_scale)


@functools.lru_cache(maxsize=4096)
def _backward_launch(
    rows: int,
    classes: int,
    row_stride: int,
    dtype: torch.dtype,
    loss_stride: int,
    smoothing: float,
    padding_idx: int,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> BoundLaunch:
    chosen = backward_config(rows, classes, dtype.itemsize, facts)
    return _kernels().xentropy_backward.bind(
        (rows, chosen.splits),
        (row_stride, classes, padding_idx, loss_stride, float(smoothing)),
        (classes % ALIGNMENT != 0, row_stride == classes, chosen.groups, chosen.lanes, 16 // dtype.itemsize),
        device=device,
        num_warps=chosen.num_warps,
    )


def triton_backward(
    loss_gradient: Tensor, logits: Tensor, log_sums: Tensor, labels: Tensor, smoothing: float, padding_idx: int
) -> Tensor:
    """The gradient of the logits, contiguous."""
    logits = with_whole_rows(logits)
    device = logits.device
    rows, classes = logits.shape
    loss_stride = loss_gradient.stride(0)
    if loss_stride > 1:
        loss_gradient, loss_stride = loss_gradient.contiguous(), 1
    launch = _backward_launch(
        rows,
        classes,
        logits.stride(0),
        logits.dtype,
        loss_stride,
        smoothing,
        padding_idx,
        device,
        _device.facts(device),
    )
    gradient = torch.empty((rows, classes), dtype=logits.dtype, device=device)
    launch(loss_gradient, logits, log_sums.contiguous(), labels.contiguous(), gradient)
    return gradient


def with_whole_rows(logits: Tensor) -> Tensor:
    """The logits, copied unless the elements of each row are adjacent."""
    return logits if logits.stride(1) == 1 and logits.stride(0) >= logits.shape[1] else logits.contiguous()
