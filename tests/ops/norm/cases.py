"""The table of norm cases: every kernel, every flag, awkward shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.harness import before_nan


@dataclass(frozen=True)
class NormCase:
    """`rows` x `columns`, normalised over `columns`; `offset` shifts the data away from zero."""

    name: str
    rows: int
    columns: int
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = torch.float32
    subtract_mean: bool = True
    bias: bool = True
    memory_efficient: bool = False
    out_dtype: torch.dtype | None = None
    offset: float = 0.0
    eps: float = 1e-5
    # Long rows take the interpreter long; for some that differ from others in their dtype, or in being a power of two
    # without a mean, a GPU is enough.
    interpreted: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def has_bias(self) -> bool:
        return self.bias and self.subtract_mean and self.weight_dtype is not None

    @property
    def result_dtype(self) -> torch.dtype:
        return self.out_dtype or self.dtype

    def tensors(self, device: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Input, gradient of the output, weight, bias."""
        generator = torch.Generator().manual_seed(self.rows * 131071 + self.columns)
        x = torch.randn(self.rows, self.columns, generator=generator) + self.offset
        dy = torch.randn(self.rows, self.columns, generator=generator)
        weight = bias = None
        if self.weight_dtype is not None:
            weight = torch.rand(self.columns, generator=generator) + 0.5
            weight = (weight * torch.where(torch.arange(self.columns) % 3 == 0, -1.0, 1.0)).to(self.weight_dtype)
            if self.has_bias:
                bias = torch.randn(self.columns, generator=generator).to(self.weight_dtype)
        tensors = (x.to(self.dtype), dy.to(self.result_dtype), weight, bias)
        return tuple(None if t is None else before_nan(t.to(device)) for t in tensors)  # type: ignore[return-value]


_HALF, _BF16, _F32 = torch.float16, torch.bfloat16, torch.float32

# Small enough for the interpreter, and each kernel with and without masks: rows (up to 8192 columns), wide (16384), and
# columns (beyond).
CASES = [
    # A row without variance multiplies rounding errors by 1/sqrt(eps).
    NormCase("one element", 1, 1, eps=0.1),
    NormCase("one row", 1, 64),
    NormCase("one column", 7, 1, eps=0.1),
    NormCase("odd", 5, 37),
    NormCase("odd rms", 5, 37, subtract_mean=False),
    NormCase("many short rows", 300, 8),
    NormCase("power of two", 8, 256),
    NormCase("power of two rms", 8, 256, subtract_mean=False),
    NormCase("no weight", 6, 100, weight_dtype=None),
    NormCase("no weight rms", 6, 100, weight_dtype=None, subtract_mean=False),
    NormCase("no bias", 6, 100, bias=False),
    NormCase("float16", 9, 192, _HALF, _HALF),
    NormCase("float16 rms", 9, 192, _HALF, _HALF, subtract_mean=False),
    NormCase("bfloat16", 9, 192, _BF16, _BF16),
    NormCase("bfloat16 rms", 9, 192, _BF16, _BF16, subtract_mean=False),
    NormCase("half input, float weight", 9, 130, _HALF, _F32),
    NormCase("half input, float weight and output", 9, 130, _HALF, _F32, out_dtype=_F32),
    NormCase("bfloat16 input, float weight and output, rms", 9, 130, _BF16, _F32, out_dtype=_F32, subtract_mean=False),
    NormCase("float input, bfloat16 weight and output", 9, 130, _F32, _BF16, out_dtype=_BF16),
    NormCase("far from zero", 6, 500, offset=100.0),
    NormCase("far from zero, long", 3, 5000, offset=100.0),
    NormCase("memory efficient", 6, 100, memory_efficient=True),
    NormCase("memory efficient rms", 6, 100, memory_efficient=True, subtract_mean=False),
    NormCase("memory efficient, no weight", 6, 100, weight_dtype=None, memory_efficient=True),
    NormCase("long", 4, 4096),
    NormCase("long rms", 4, 4096, subtract_mean=False, interpreted=False),
    NormCase("long odd", 3, 4100),
    NormCase("long odd rms", 3, 4100, subtract_mean=False),
    NormCase("wide", 4, 16384),
    NormCase("wide rms", 4, 16384, subtract_mean=False, interpreted=False),
    NormCase("wide part", 4, 9000),
    NormCase("wide part rms", 4, 9000, subtract_mean=False),
    NormCase("wide, no weight", 4, 9000, weight_dtype=None),
    NormCase("wide memory efficient", 4, 9000, memory_efficient=True),
    NormCase("wide bfloat16", 5, 16384, _BF16, _BF16, interpreted=False),
    NormCase("wide bfloat16 rms", 5, 16384, _BF16, _BF16, subtract_mean=False, interpreted=False),
    NormCase("wide part float16", 4, 9000, _HALF, _HALF, interpreted=False),
    NormCase("wide odd float16", 4, 9001, _HALF, _HALF),
    NormCase("unlimited", 4, 17000),
    NormCase("unlimited rms", 4, 17000, subtract_mean=False),
    NormCase("unlimited memory efficient", 4, 17000, memory_efficient=True, interpreted=False),
    NormCase("unlimited, no weight", 4, 17000, weight_dtype=None),
]
