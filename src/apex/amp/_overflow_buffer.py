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
    """A buffer of float32 numbers on a device, filled from its start in every step; `number` identifies it."""

    def __init__(self, number: int, device: torch.device) -> None:
        self.number, self.device, self.used = number, device, 0
        self._index = -1 if device.index is None else device.index
        self._kernel_dtypes = float8.amax_dtypes(device)
        self._shape = (_CHUNK, float8.WRITE_PARTIALS) if self._kernel_dtypes else (_CHUNK,)
        self._chunks: list[Tensor] = []
        # The memory and address of each number: a row of partial maxima as int32, or one float32 without kernels.
        self._rows: list[Tensor] = []
        self._addresses: list[int] = []
        # Direct launches of the kernel, by kind, dtype and size of tensors that were measured before, because an eager
        # step with small tensors waits for the host.
        self._launches: dict[tuple[Any, ...], Any] = {}

    def measure(self, tensor: Tensor) -> Slot | None:
        """Write the largest magnitude of a tensor to the next number, and return its slot.

        Return None for a tensor that is not measured: sparse, nested, empty or of another dtype.
        """
        kind = type(tensor), tensor.layout, tensor.is_nested, tensor.dtype, tensor.numel()
        launch, index = self._launches.get(kind), self.used
        if (
            launch is None
            or index == len(self._addresses)
            or not tensor.is_contiguous()
            or (address := tensor.data_ptr()) % 16
            or current_device() != self._index
        ):
            return self._measure_any(tensor)
        self.used = index + 1
        launch(current_stream(self._index), (address, self._addresses[index]), ())
        return self.number, index

    def _measure_any(self, tensor: Tensor) -> Slot | None:
        """Measure any tensor and return its slot, as `measure` does; keep the direct launch for tensors of its kind."""
        if tensor.layout is not _STRIDED or tensor.is_nested or not tensor.numel() or tensor.dtype not in _DTYPES:
            return None
        tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor's maximum would communicate
        index = self.used
        if index == len(self._addresses):
            self._allocate()
        row = self._rows[index]
        if tensor.dtype in self._kernel_dtypes and float8.fills_memory(tensor):
            launch = float8.write_amax(tensor, row)
            if launch is not None and self._addresses[index] % 16 == 0:
                self._launches[Tensor, _STRIDED, False, tensor.dtype, tensor.numel()] = launch
        else:
            _write_by_operators(tensor.detach(), row.view(torch.float32))
        self.used = index + 1
        return self.number, index

    def values(self) -> list[Tensor]:
        """Return the numbers of this step as a list of vectors."""
        filled = enumerate(self._chunks[: -(-self.used // _CHUNK)])
        parts = [chunk[: self.used - index * _CHUNK] for index, chunk in filled]
        return parts if len(self._shape) == 1 else [part.amax(1) for part in parts]

    def _allocate(self) -> None:
        self._chunks.append(torch.empty(self._shape, dtype=torch.float32, device=self.device))
        chunk = self._chunks[-1]
        rows = (chunk if len(self._shape) == 1 else chunk.view(torch.int32)).unbind()
        self._rows += rows
        self._addresses += [row.data_ptr() for row in rows]


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
