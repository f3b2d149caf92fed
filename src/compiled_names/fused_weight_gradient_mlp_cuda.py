"""Upstream's compiled module of this name: accumulates weight gradients in one matrix product.

`d_weight` [out, in] += `d_output` [..., out] transposed, times `input` [..., in].
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex.ops.dense import wgrad_gemm_accum


def wgrad_gemm_accum_fp32(input_2d: Tensor, d_output_2d: Tensor, d_weight: Tensor) -> None:
    """Accumulate into a float32 `d_weight`, from inputs in any precision up to float32."""
    if d_weight.dtype != torch.float32:
        raise TypeError(f"d_weight is {d_weight.dtype}; wgrad_gemm_accum_fp32 adds to float32")
    wgrad_gemm_accum(input_2d, d_output_2d, d_weight)


def wgrad_gemm_accum_fp16(input_2d: Tensor, d_output_2d: Tensor, d_weight: Tensor) -> None:
    """Accumulate into a `d_weight` in the inputs' half precision, float16 or bfloat16."""
    if d_weight.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"d_weight is {d_weight.dtype}; wgrad_gemm_accum_fp16 adds to float16 or bfloat16")
    wgrad_gemm_accum(input_2d, d_output_2d, d_weight)
