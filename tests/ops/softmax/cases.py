"""The table of softmax cases: every kind of mask, every way through the kernels, awkward shapes."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from apex.ops.softmax import SoftmaxSpec

_F32, _BF16, _HALF = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class SoftmaxCase:
    """`mask` is none, causal, bool, uint8 or added; `mask_shape` is broadcast to `shape` (default: the same)."""

    name: str
    shape: tuple[int, ...]
    mask: str = "none"
    mask_shape: tuple[int, ...] | None = None
    dtype: torch.dtype = _F32
    mask_dtype: torch.dtype = _F32
    scale: float = 0.7

    def __str__(self) -> str:
        return self.name

    @property
    def spec(self) -> SoftmaxSpec:
        return SoftmaxSpec(self.scale, self.mask == "causal")

    def tensors(self, device: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """Input, gradient of the output, mask; nothing is left of the mask's first row."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        x = (2 * torch.randn(self.shape, generator=generator)).to(self.dtype).to(device)
        dy = torch.randn(self.shape, generator=generator).to(self.dtype).to(device)
        if self.mask in ("none", "causal"):
            return x, dy, None
        mask_shape = self.shape if self.mask_shape is None else self.mask_shape
        hidden = torch.rand(mask_shape, generator=generator) < 0.3
        hidden.view(-1, mask_shape[-1])[0] = True
        if self.mask == "added":
            mask = torch.randn(mask_shape, generator=generator).masked_fill(hidden, -torch.inf).to(self.mask_dtype)
        else:
            mask = hidden.to(torch.uint8) * 3 if self.mask == "uint8" else hidden
        return x, dy, mask.to(device)


# Small enough for the interpreter. Short rows are held in registers, several of them by a program; those of more than
# 16384 elements, or 8192 of causal ones, are walked in chunks.
CASES = [
    SoftmaxCase("one element", (1, 1)),
    SoftmaxCase("one dimension", (37,)),
    SoftmaxCase("one key", (3, 5, 1), "bool"),
    SoftmaxCase("short rows", (2, 3, 40, 8)),
    SoftmaxCase("power of two", (2, 4, 256)),
    SoftmaxCase("odd", (3, 5, 37), dtype=_HALF),
    SoftmaxCase("bfloat16", (3, 5, 100), dtype=_BF16),
    SoftmaxCase("negative scale", (3, 5, 48), "causal", scale=-1.5),
    SoftmaxCase("causal", (2, 3, 32, 32), "causal"),
    SoftmaxCase("causal odd", (2, 37, 37), "causal", dtype=_BF16),
    SoftmaxCase("causal, two dimensions", (20, 20), "causal", dtype=_HALF),
    SoftmaxCase("causal, more keys", (2, 2, 5, 44), "causal"),
    SoftmaxCase("causal, more queries", (2, 2, 50, 16), "causal"),
    SoftmaxCase("bool per batch", (3, 2, 8, 64), "bool", (3, 1, 8, 64), _BF16),
    SoftmaxCase("bool for all", (3, 2, 8, 33), "bool", (1, 1, 8, 33)),
    SoftmaxCase("bool of every head", (2, 3, 5, 20), "bool", None, _HALF),
    SoftmaxCase("uint8 per key", (3, 2, 9, 24), "uint8", (3, 1, 1, 24), _BF16),
    SoftmaxCase("uint8 per head", (2, 3, 4, 16), "uint8", (3, 1, 16)),
    SoftmaxCase("bool per query", (2, 3, 4, 16), "bool", (2, 1, 4, 1)),
    SoftmaxCase("bool in two dimensions", (2, 3, 4, 18), "bool", (4, 18)),
    SoftmaxCase("bool in one dimension", (2, 3, 4, 18), "bool", (18,)),
    SoftmaxCase("bool, five dimensions", (2, 3, 2, 4, 18), "bool", (3, 1, 4, 18)),
    SoftmaxCase("bool of every one of five dimensions", (2, 3, 2, 4, 18), "bool", (2, 1, 2, 1, 18)),
    SoftmaxCase("added", (2, 3, 6, 40), "added", (2, 1, 6, 40)),
    SoftmaxCase("added bfloat16", (2, 3, 6, 40), "added", (2, 1, 1, 40), _BF16, _BF16, scale=0.5),
    SoftmaxCase("added float32 to float16", (2, 3, 6, 41), "added", (6, 41), _HALF, _F32),
    SoftmaxCase("added float64 to float32", (2, 3, 6, 24), "added", (1, 3, 6, 24), _F32, torch.float64),
    SoftmaxCase("wide", (2, 4096), dtype=_BF16),
    SoftmaxCase("chunks", (1, 16400)),
    SoftmaxCase("full chunks", (1, 24576), dtype=_BF16),
    SoftmaxCase("chunks causal", (2, 8208), "causal", dtype=_BF16),
    SoftmaxCase("chunks bool", (1, 1, 2, 16403), "bool", (1, 1, 2, 16403), _HALF),
    SoftmaxCase("chunks added", (1, 2, 1, 16400), "added", (1, 2, 1, 16400)),
]

# For a GPU only: sizes of real models.
LARGE_CASES = [
    SoftmaxCase(f"{mask} {str(dtype).removeprefix('torch.')} {shape}", shape, mask, mask_shape, dtype)
    for dtype in (_F32, _BF16, _HALF)
    for shape, mask, mask_shape in (
        ((4, 2048, 2048), "causal", None),
        ((1, 3000, 3000), "causal", None),
        ((1, 300, 8192), "causal", None),
        ((1, 100, 40000), "causal", None),
        ((2, 4, 1024, 1024), "bool", (2, 1, 1024, 1024)),
        ((2, 4, 333, 1500), "uint8", (2, 1, 1, 1500)),
        ((8, 8, 128, 128), "added", (1, 8, 128, 128)),
        ((20000, 64), "none", None),
        ((700, 16384), "none", None),
        ((130, 50257), "none", None),
    )
]
