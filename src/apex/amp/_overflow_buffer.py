"""Largest magnitudes of tensors, in a buffer on their device that `trace_overflow` sends to the host.

A NaN or an infinity makes a magnitude NaN or infinite, so one number is both a flag and a value for a message. On a GPU
one kernel reads a tensor once and writes a row of partial maxima. The rows of a step are reduced together at its end:
no measurement needs memory that was set to zero, atomic operations or a second launch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..ops import float8
from ..ops._library import autocast_off

# Numbers that one allocation holds. A step of a GPT with 12 layers needs about 220.
_CHUNK = 256


class MagnitudeBuffer:
    """float32 numbers on a device, used from the start in every step; `number` is its index among the buffers."""

    def __init__(self, number: int, device: torch.device) -> None:
        self.number, self.device, self.used = number, device, 0
        has_kernel = float8.has_amax_kernel(torch.empty(1, dtype=torch.float32, device=device))
        self._shape = (_CHUNK, float8.MOST_PARTIALS) if has_kernel else (_CHUNK,)
        self._chunks: list[Tensor] = []
        # The memory of each number: a row of partial maxima, as int32, or without kernels one float32.
        self._rows: list[Tensor] = []

    def measure(self, tensor: Tensor) -> int:
        """Write the largest magnitude of a tensor that has elements to the next number, and return its index."""
        if self.used == len(self._rows):
            self._allocate()
        row = self._rows[self.used]
        self.used += 1
        if row.dim() and float8.has_amax_kernel(tensor):
            float8.write_amax(tensor, row)
        else:
            _write_by_operators(tensor.detach(), row.view(torch.float32))
        return self.used - 1

    def values(self) -> list[Tensor]:
        """Return the numbers of this step as a list of vectors."""
        filled = enumerate(self._chunks[: -(-self.used // _CHUNK)])
        parts = [chunk[: self.used - index * _CHUNK] for index, chunk in filled]
        return parts if len(self._shape) == 1 else [part.amax(1) for part in parts]

    def _allocate(self) -> None:
        self._chunks.append(torch.empty(self._shape, dtype=torch.float32, device=self.device))
        chunk = self._chunks[-1]
        self._rows += (chunk if len(self._shape) == 1 else chunk.view(torch.int32)).unbind()


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
