"""The tables of attention cases, and what counts as right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from apex.ops._tolerance import TOLERANCES

_HALF, _BF16, _F32 = torch.float16, torch.bfloat16, torch.float32


def assert_close(actual: Tensor, expected: Tensor, what: str = "result", dtype: torch.dtype | None = None) -> None:
    """Within the table's tolerance of the largest element, for tensors that were computed in `dtype`.

    Probabilities and their gradients are rounded to the dtype of the inputs before they are multiplied by values, keys
    or queries. So an element's error follows the size of what was added up, not what cancellation leaves of it.
    """
    assert actual.shape == expected.shape, f"{what} has shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    exact = expected.detach().cpu().double()
    reach = max(1e-3, float(exact.abs().max())) if exact.numel() else 1.0
    error = (actual.detach().cpu().double() - exact).abs()
    assert not error.isnan().any(), f"{what} has NaN"
    allowed = max(TOLERANCES[dtype or actual.dtype]) * reach
    worst = float(error.max()) if error.numel() else 0.0
    assert worst <= allowed, f"{what} is off by {worst:.3g}, {worst / allowed:.3g} times what is allowed"


@dataclass(frozen=True)
class BiasedCase:
    """Query of `shape` [..., H, M, D]; `keys` is N; shapes of mask and bias, or None."""

    name: str
    shape: tuple[int, ...]
    keys: int
    mask: tuple[int, ...] | None = None
    bias: tuple[int, ...] | None = None
    dtype: torch.dtype = _F32
    bias_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        return self.name

    def tensors(self, device: str) -> tuple[list[Tensor], Tensor | None, Tensor]:
        """Query, key, value and, if there is one, bias; mask; gradient of the output."""
        generator = torch.Generator().manual_seed(sum(self.shape) + self.keys)
        *lead, _, head = self.shape
        shapes = [self.shape, (*lead, self.keys, head), (*lead, self.keys, head)]
        inputs = [torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes]
        if self.bias is not None:
            inputs.append(torch.randn(self.bias, generator=generator).to(self.bias_dtype or self.dtype))
        mask = None
        if self.mask is not None:
            mask = (torch.rand(self.mask, generator=generator) > 0.3).to(self.dtype)
            mask[..., 0] = 1  # rows without keys are tested apart
        dout = torch.randn(self.shape, generator=generator).to(self.dtype)
        return [t.to(device) for t in inputs], None if mask is None else mask.to(device), dout.to(device)


# Tiles with and without masks, every dtype: few and small enough for the interpreter.
BIASED_CASES = [
    BiasedCase("plain", (1, 2, 20, 16), 20),
    BiasedCase("one element", (1, 1, 1, 1), 1, (1, 1, 1, 1), (1, 1, 1, 1)),
    BiasedCase("openfold", (1, 2, 1, 32, 16), 32, (1, 2, 1, 1, 32), (1, 1, 1, 32, 32)),
    BiasedCase("openfold bfloat16", (1, 2, 1, 32, 32), 32, (1, 2, 1, 1, 32), (1, 1, 1, 32, 32), _BF16),
    BiasedCase("openfold float16", (2, 1, 32, 32), 32, (2, 1, 1, 32), (1, 1, 32, 32), _HALF),
    BiasedCase("mask alone", (2, 1, 17, 24), 40, (2, 1, 1, 40)),
    BiasedCase("more keys than a tile", (1, 1, 5, 40), 70, (1, 1, 1, 70), (1, 1, 5, 70)),
    BiasedCase("more queries than a tile", (1, 1, 70, 40), 5, None, (1, 1, 70, 5)),
    BiasedCase("bias per outer batch", (2, 2, 1, 5, 8), 7, (2, 1, 1, 1, 7), (2, 1, 1, 5, 7)),
]

# Further ways in which a mask or a bias can be shared, which the code around the kernels sorts out.
SHARED_CASES = [
    BiasedCase("float bias", (3, 2, 33, 8), 33, (3, 1, 1, 33), (1, 2, 33, 33), _BF16, _F32),
    BiasedCase("bias alone", (3, 2, 33, 24), 70, None, (2, 33, 70)),
    BiasedCase("own bias each", (3, 2, 33, 8), 35, (35,), (3, 2, 33, 35)),
    BiasedCase("bias per inner batch", (2, 2, 1, 17, 8), 19, (1, 2, 1, 1, 19), (2, 1, 17, 19)),
    BiasedCase("bias of keys", (1, 2, 17, 8), 19, None, (1, 1, 1, 19)),
    BiasedCase("mask of logits", (2, 1, 17, 8), 19, (2, 1, 17, 19), (1, 1, 17, 19)),
    BiasedCase("mask of logits alone", (2, 2, 17, 8), 19, (1, 2, 17, 19)),
    BiasedCase("no batch", (2, 17, 8), 19, (1, 19), (2, 17, 19)),
]


@dataclass(frozen=True)
class PackedCase:
    """Sequences of `lengths`, then `tail` rows that belong to none."""

    name: str
    lengths: tuple[int, ...]
    heads: int
    head_dim: int
    tail: int = 0
    dtype: torch.dtype = _F32
    dropout_p: float = 0.0
    spare: int = 0  # by how much max_seqlen exceeds the longest sequence
    bounds_dtype: torch.dtype = torch.int32

    def __str__(self) -> str:
        return self.name

    @property
    def max_seqlen(self) -> int:
        return max(self.lengths, default=0) + self.spare

    def tensors(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """qkv, cu_seqlens, gradient of the output."""
        generator = torch.Generator().manual_seed(sum(self.lengths) + self.head_dim)
        rows = sum(self.lengths) + self.tail
        qkv = torch.randn(rows, 3, self.heads, self.head_dim, generator=generator).to(self.dtype)
        dout = torch.randn(rows, self.heads, self.head_dim, generator=generator).to(self.dtype)
        bounds = torch.tensor([0, *self.lengths]).cumsum(0).to(self.bounds_dtype)
        return qkv.to(device), bounds.to(device), dout.to(device)


PACKED_CASES = [
    PackedCase("one row", (1,), 1, 16),
    PackedCase("even", (16, 16), 2, 16),
    PackedCase("uneven", (20, 33, 0, 7), 1, 16),
    PackedCase("with a tail", (20, 3), 1, 16, tail=45),
    PackedCase("long bounds", (9, 3), 1, 16, tail=2, bounds_dtype=torch.int64),
    PackedCase("longer than a tile", (150,), 1, 64, dtype=_HALF),
    PackedCase("bfloat16", (20, 17), 1, 32, dtype=_BF16, tail=3),
    PackedCase("float16, odd head", (20, 17), 1, 20, dtype=_HALF),
    PackedCase("spare length", (9, 5), 1, 8, spare=20),
    PackedCase("dropout", (20, 17), 2, 16, dropout_p=0.3, tail=3),
    PackedCase("dropout float16", (20, 17), 1, 32, dropout_p=0.1, dtype=_HALF),
]

# For a GPU only: dropout, which the examples do not have.
LARGE_PACKED_CASES = [
    PackedCase(f"{str(dtype).removeprefix('torch.')} {d} {p}", (512, 3, 377, 128, 512), 4, d, 100, dtype, p)
    for dtype in (_BF16, _HALF, _F32)
    for d, p in ((64, 0.1), (128, 0.1))
]
