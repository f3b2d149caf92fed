"""Largest magnitudes of tensors, in a buffer on their device that `trace_overflow` sends to the host.

A NaN or an infinity makes a magnitude NaN or infinite, so one number is both a flag and a value for a message. On a GPU
one kernel reads a tensor once and writes a row of partial maxima. The rows of a step are reduced together at its end:
no measurement needs memory that was set to zero, atomic operations or a second launch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..ops import float8
from ..ops._device import current_device, current_stream
from ..ops._library import autocast_off

# Numbers that one allocation holds. A step of a GPT with 12 layers needs about 220.
_CHUNK = 256
_STRIDED = torch.strided
_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

Slot = tuple[int, int]  # number of a buffer, and index in it


class MagnitudeBuffer:
    """float32 numbers on a device, used from the start in every step; `number` is its index among the buffers."""

    def __init__(self, number: int, device: torch.device) -> None:
        self.number, self.device, self.used = number, device, 0
        self._index = -1 if device.index is None else device.index
        self._kernel_dtypes = float8.amax_dtypes(device)
        self._shape = (_CHUNK, float8.WRITE_PARTIALS) if self._kernel_dtypes else (_CHUNK,)
        self._chunks: list[Tensor] = []
        # Each number's slot, its memory, and the address of the memory: a row of partial maxima, as int32, or without
        # kernels one float32.
        self._rows: list[tuple[Slot, Tensor, int]] = []
        # Direct launches of the kernel, by dtype and size of tensors that were measured before, because an eager step
        # with small tensors waits for the host.
        self._launches: dict[tuple[torch.dtype, int], Any] = {}

    def measure(self, tensor: Tensor) -> Slot | None:
        """Write the largest magnitude of a tensor to the next number, and return its slot.

        Return None for tensors that have none: sparse, nested or empty ones, and other dtypes.
        """
        if self.used == len(self._rows):
            self._allocate()
        slot, row, row_address = self._rows[self.used]
        launch = self._launches.get((tensor.dtype, tensor.numel()))
        if (
            launch is not None
            and type(tensor) is Tensor
            and tensor.layout is _STRIDED
            and not tensor.is_nested
            and tensor.is_contiguous()
            and ((address := tensor.data_ptr()) | row_address) % 16 == 0
            and current_device() == self._index
        ):
            launch(current_stream(self._index), (address, row_address), ())
        elif not self._measure_any(tensor, row):
            return None
        self.used += 1
        return slot

    def _measure_any(self, tensor: Tensor, row: Tensor) -> bool:
        """Write the largest magnitude of a tensor to a row; return False if it has none."""
        if tensor.layout is not _STRIDED or tensor.is_nested or not tensor.numel() or tensor.dtype not in _DTYPES:
            return False
        tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor's maximum would communicate
        if tensor.dtype in self._kernel_dtypes and float8.fills_memory(tensor):
            launch = float8.write_amax(tensor, row)
            if launch is not None:
                self._launches[tensor.dtype, tensor.numel()] = launch
        else:
            _write_by_operators(tensor.detach(), row.view(torch.float32))
        return True

    def values(self) -> list[Tensor]:
        """Return the numbers of this step as a list of vectors."""
        filled = enumerate(self._chunks[: -(-self.used // _CHUNK)])
        parts = [chunk[: self.used - index * _CHUNK] for index, chunk in filled]
        return parts if len(self._shape) == 1 else [part.amax(1) for part in parts]

    def _allocate(self) -> None:
        self._chunks.append(torch.empty(self._shape, dtype=torch.float32, device=self.device))
        chunk = self._chunks[-1]
        rows = (chunk if len(self._shape) == 1 else chunk.view(torch.int32)).unbind()
        first = len(self._rows)
        self._rows += [((self.number, first + index), row, row.data_ptr()) for index, row in enumerate(rows)]


def _write_by_operators(tensor: Tensor, row: Tensor) -> None:
    """Write the largest magnitude of a tensor to all elements of `row`, float32."""
    with autocast_off(tensor):
        if tensor.dtype == torch.float64:
            largest = torch.linalg.vector_norm(tensor, math.inf)
            most = torch.finfo(torch.float32).max
            row.copy_(torch.where(largest.isinf(), largest, largest.clamp(max=most)))
        elif row.dim():
            row.copy_(torch.linalg.vector_norm(tensor, math.inf, dtype=torch.float32))
        else:
            torch.linalg.vector_norm(tensor, math.inf, dtype=torch.float32, out=row)
