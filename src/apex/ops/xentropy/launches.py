"""From tensors to kernel launches: allocation, launch configuration, tensors in kernel order.

What depends on shapes and dtypes alone is planned once and cached; a call then allocates its results and launches.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _device

if TYPE_CHECKING:
    from .._launch import BoundLaunch

# Multiples of so many elements are where the kernels' blocks begin (`kernels.ALIGNMENT`).
ALIGNMENT = 16
# Rows up to this length are held in registers, several per program.
SHORT_ROW = 1024


@dataclass(frozen=True)
class BlockConfig:
    """A block is `groups` accesses of 16 bytes by each of `lanes` threads; `splits` programs share a row."""

    groups: int
    lanes: int
    num_warps: int
    splits: int = 1


@dataclass(frozen=True)
class ShortConfig:
    """Whole rows of up to `block` elements, `rows_per_program` of them."""

    rows_per_program: int
    block: int
    num_warps: int


# Times are microseconds on an H200, of kernels launched directly.


def forward_config(
    rows: int, classes: int, element_size: int, gradient: bool, device: _device.DeviceFacts
) -> BlockConfig:
    # Two accesses in flight: bfloat16 8192x131072 in 484, with four 523, with eight 854; 16384x50257 in 389, with four
    # 472. More threads do better where a row is read again for its gradient (2048x50257 in 148, else 170), and where
    # there are too few rows for every multiprocessor to have several (64x131072 in 18, with 256 threads 28).
    lanes = 512 if gradient else 256
    if rows < 4 * device.multiprocessors:
        lanes = 1024
    return _fitted(classes, element_size, groups=2, lanes=lanes, device=device)


def backward_config(rows: int, classes: int, element_size: int, device: _device.DeviceFacts) -> BlockConfig:
    # One access of many threads: float32 8192x131072 in 2154, of fewer 2229, four accesses 2601. Four programs for a
    # row that is not whole blocks share its rest: bfloat16 16384x50257 in 877, else 1016.
    config = _fitted(classes, element_size, groups=1, lanes=512, device=device)
    splits = 4 if classes % ALIGNMENT else 1
    splits = max(splits, -(-4 * device.multiprocessors // rows))
    blocks = -(-classes * element_size // (16 * config.lanes))
    return replace(config, splits=min(splits, blocks))


def short_config(rows: int, classes: int, device: _device.DeviceFacts) -> ShortConfig:
    block = 1 << max(0, classes - 1).bit_length()
    per_program = max(1, 4096 // max(16, block))
    while per_program > 1 and rows // per_program < 4 * device.multiprocessors:
        per_program //= 2
    return ShortConfig(per_program, block, max(1, min(128, per_program * block // 8) // device.warp_size))


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


class Plan:
    """The launches for logits of one shape and dtype: losses, gradients, and both at once."""

    def __init__(
        self,
        rows: int,
        classes: int,
        row_stride: int,
        dtype: torch.dtype,
        smoothing: float,
        padding_idx: int,
        device: torch.device,
        facts: _device.DeviceFacts,
    ) -> None:
        self._rows, self._classes, self._row_stride, self._dtype = rows, classes, row_stride, dtype
        self._smoothing, self._padding_idx = float(smoothing), padding_idx
        self._device, self._facts = device, facts
        self._is_short = classes <= SHORT_ROW
        self._forward = self._bind_short(False, 1) if self._is_short else self._bind_forward(False, 0)
        self._backward: dict[tuple[int, torch.dtype], BoundLaunch] = {}
        self._both: dict[bool, BoundLaunch] = {}

    def forward(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Losses and logarithms of the sums of exponentials."""
        losses = torch.empty(self._rows, dtype=torch.float32, device=self._device)
        log_sums = torch.empty(self._rows, dtype=torch.float32, device=self._device)
        self._forward(logits, labels, losses, log_sums, None)
        return losses, log_sums

    def backward(self, loss_gradient: Tensor, logits: Tensor, log_sums: Tensor, labels: Tensor) -> Tensor:
        """The gradient of the logits, contiguous; the losses' may be one value for all rows, with a stride of 0."""
        stride = loss_gradient.stride(0)
        if stride > 1:
            loss_gradient, stride = loss_gradient.contiguous(), 1
        launch = self._backward.get((stride, loss_gradient.dtype))
        if launch is None:
            bind = functools.partial(self._bind_short, True) if self._is_short else self._bind_backward
            launch = self._backward[stride, loss_gradient.dtype] = bind(stride)
        gradient = torch.empty(self._rows, self._classes, dtype=self._dtype, device=self._device)
        if self._is_short:
            launch(logits, labels, loss_gradient, log_sums, gradient)
        else:
            launch(loss_gradient, logits, log_sums, labels, gradient)
        return gradient

    def both(self, logits: Tensor, labels: Tensor, losses: Tensor, row_scale: Tensor | None) -> None:
        """Writes the losses, and over the logits their gradient times `row_scale`."""
        is_scaled = row_scale is not None
        launch = self._both.get(is_scaled)
        if launch is None:
            launch = self._both[is_scaled] = self._bind_forward(True, int(is_scaled))
        launch(logits, labels, losses, torch.empty_like(losses), row_scale)

    def _bind_forward(self, gradient: bool, scale_stride: int) -> BoundLaunch:
        size = self._dtype.itemsize
        chosen = forward_config(self._rows, self._classes, size, gradient, self._facts)
        edges = self._row_stride % ALIGNMENT != 0 or self._classes % ALIGNMENT != 0
        return _kernels().xentropy_forward.bind(
            (self._rows,),
            (self._row_stride, self._classes, self._padding_idx, scale_stride, self._smoothing),
            (self._smoothing > 0, edges, gradient, chosen.groups, chosen.lanes, 16 // size),
            device=self._device,
            num_warps=chosen.num_warps,
        )

    def _bind_backward(self, loss_stride: int) -> BoundLaunch:
        size, classes = self._dtype.itemsize, self._classes
        chosen = backward_config(self._rows, classes, size, self._facts)
        return _kernels().xentropy_backward.bind(
            (self._rows * chosen.splits,),
            (chosen.splits, self._row_stride, classes, self._padding_idx, loss_stride, self._smoothing),
            (classes % ALIGNMENT != 0, self._row_stride == classes, chosen.groups, chosen.lanes, 16 // size),
            device=self._device,
            num_warps=chosen.num_warps,
        )

    def _bind_short(self, backward: bool, loss_stride: int) -> BoundLaunch:
        chosen = short_config(self._rows, self._classes, self._facts)
        multiple = math.gcd(self._row_stride, self._classes, 16 // self._dtype.itemsize)
        return _kernels().xentropy_short_rows.bind(
            (-(-self._rows // chosen.rows_per_program),),
            (self._rows, self._row_stride, self._classes, self._padding_idx, loss_stride, self._smoothing),
            (backward, self._smoothing > 0, chosen.rows_per_program, chosen.block, multiple),
            device=self._device,
            num_warps=chosen.num_warps,
        )


_cached_plan = functools.lru_cache(maxsize=4096)(Plan)


def plan(logits: Tensor, smoothing: float, padding_idx: int) -> Plan:
    """The plan for rows x classes like these, whose rows have adjacent elements."""
    rows, classes = logits.shape
    device = logits.device
    facts = _device.facts(device)
    return _cached_plan(rows, classes, logits.stride(0), logits.dtype, smoothing, padding_idx, device, facts)


def with_whole_rows(logits: Tensor) -> Tensor:
    """The logits, copied unless the elements of each row are adjacent."""
    stride = logits.stride()
    return logits if stride[1] == 1 and stride[0] >= logits.shape[1] else logits.contiguous()
