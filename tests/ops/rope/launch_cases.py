"""Launches of the rope kernel to compile for every GPU: each flag, at sizes that real models use."""

from __future__ import annotations

import torch
from torch import Tensor

from apex.ops.rope import RopeSpec, op

_BF16, _F32, _HALF = torch.bfloat16, torch.float32, torch.float16


def _empty(*shape: int, dtype: torch.dtype = _F32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def record() -> None:
    """Launches every case, to be called under `record_launches`."""
    edges = _empty(9, dtype=torch.int32)
    image = (_empty(1, 64, 1, 64),) * 2 + (_empty(1, 80, 1, 64),) * 2
    cases = [
        (RopeSpec("sbhd"), (_empty(4096, 4, 32, 128, dtype=_BF16),), (_empty(4096, 1, 1, 128),), None),
        # Masks for heads and channels, some of which are copied; strides that are multiples of 8.
        (RopeSpec("sbhd", True, True), (_empty(4097, 2, 7, 72, dtype=_HALF),), (_empty(4097, 1, 1, 40),), None),
        (RopeSpec("bshd"), (_empty(4, 4096, 8, 128, dtype=_BF16),), (_empty(4096, 1, 1, 64, dtype=_BF16),) * 2, None),
        # Neighbours: all channels, and a part that is put into halves.
        (RopeSpec("bshd", pairs="neighbours"), (_empty(4, 4096, 8, 128, dtype=_BF16),), (_empty(4096, 128),) * 2, None),
        (
            RopeSpec("bshd", pairs="neighbours to halves"),
            (_empty(4, 4096, 8, 192, dtype=_BF16),),
            (_empty(4096, 64, dtype=_BF16),) * 2,
            None,
        ),
        (RopeSpec("sbhd"), (_empty(512, 2, 128, 8).transpose(2, 3),), (_empty(512, 1, 1, 128),), None),
        (RopeSpec("thd"), (_empty(16384, 32, 128, dtype=_BF16),), (_empty(4096, 1, 1, 128),), edges),
        (RopeSpec("image", width=80), (_empty(2, 5120, 16, 128, dtype=_BF16),), image, None),
        (
            RopeSpec("sbhd"),
            (_empty(4096, 4, 32, 128, dtype=_BF16), _empty(4096, 4, 8, 128, dtype=_BF16)),
            (_empty(4096, 1, 1, 128),),
            None,
        ),
    ]
    for spec, tensors, tables, cu_seqlens in cases:
        op.launch(tensors, tables, spec, cu_seqlens)
