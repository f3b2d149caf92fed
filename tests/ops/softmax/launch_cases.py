"""Launches of the softmax kernels to compile for every GPU: each kind of mask and noise, held and in chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from apex.ops.softmax import SoftmaxSpec, op

_BF16, _F32, _HALF = torch.bfloat16, torch.float32, torch.float16

# shape, dtype, mask shape and dtype, causal, dtype of the noise
_CASES: list[tuple] = [
    ((64, 2048, 2048), _BF16, None, None, True, None),
    ((8, 16, 2048, 2048), _BF16, (8, 1, 2048, 2048), torch.bool, False, None),
    ((16, 16, 512, 100), _HALF, (16, 1, 1, 100), torch.uint8, False, torch.uint8),
    ((16, 16, 512, 500), _F32, (16, 1, 1, 500), _F32, False, torch.int64),
    ((2, 300, 100000), _BF16, None, None, True, torch.int64),
]


def record() -> None:
    """Plans and (under `record_launches`) collects forward and backward of every case."""
    for shape, dtype, mask_shape, mask_dtype, causal, noise_dtype in _CASES:
        x = torch.empty(shape, dtype=dtype, device="meta")
        mask = None if mask_shape is None else torch.empty(mask_shape, dtype=mask_dtype, device="meta")
        noise: Tensor | None = None
        if noise_dtype is not None:
            noise = torch.empty(1 if noise_dtype == torch.int64 else shape, dtype=noise_dtype, device="meta")
        spec = SoftmaxSpec(0.125, causal, 0.0 if noise is None else 0.1)
        output, _ = op.launch_forward(x, mask, noise, *spec)
        op.launch_backward(output, x, noise, *spec, (True,))
