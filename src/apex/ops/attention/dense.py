"""Packed sequences that all have the greatest length: one batch, for cuDNN's attention that PyTorch brings along.

Only the device knows the lengths. The host knows that there are as many rows as sequences of the greatest length would
have, so that either all have it or rows are left over behind the last one. It lets cuDNN compute the first and launches
the kernel behind it, which finds in `cu_seqlens` that there is nothing left to do, or does all of it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

# Microseconds on an H200, forward, in float16, cuDNN's and the kernel's: TO BE MEASURED
SHORTEST = 256


def takes(qkv: Tensor, sequences: int, length: int) -> bool:
    """Whether cuDNN is asked first."""
    total, _, _, head_dim = qkv.shape
    return (
        total == sequences * length
        and length >= SHORTEST
        and qkv.dtype.itemsize == 2
        and head_dim % 8 == 0
        and head_dim <= 128
        and qkv.is_contiguous()
        and qkv.data_ptr() % 16 == 0
        and _is_hopper(qkv.device)
        and torch.backends.cuda.cudnn_sdp_enabled()
    )


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    """Where cuDNN's attention is quicker than the kernel; it was measured there alone."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) == (9, 0)
        and torch.backends.cudnn.is_available()
    )


def forward(qkv: Tensor, sequences: int, length: int, saves: bool) -> tuple[Tensor, Tensor]:
    """Output [total, H, D] and statistics [sequences, H, length], which are empty unless it `saves` them."""
    total, _, heads, head_dim = qkv.shape
    query, key, value = qkv.view(sequences, length, 3, heads, head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    output, logsumexp, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, saves)
    statistics = logsumexp.view(sequences, heads, length) if saves else qkv.new_empty(0, dtype=torch.float32)
    return output.transpose(1, 2).reshape(total, heads, head_dim), statistics
