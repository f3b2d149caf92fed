"""Packed sequences that all have the greatest length: one batch, for cuDNN's attention that PyTorch brings along.

Only the device knows the lengths. The host knows that there are as many rows as sequences of the greatest length would
have, so that either all have it or rows are left over behind the last one. It lets cuDNN compute the first and launches
a kernel behind it, which finds in `cu_seqlens` that there is nothing left to do, or does all of it.

Microseconds on an H200, forward in float16 with 16 heads, of the kernel alone and of cuDNN's with the launch behind it:
56 sequences of 512 rows, heads of 64: 192 and 167; 56 of 256: 67 and 56; 112 of 128: 51 and 42; 16 of 512, heads of
128: 112 and 75; 4 of 512: 20 and 22. The launch behind it takes 3 of them, and the host is busy for 45 more.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

SHORTEST = 128
# Of the output; more were never given to cuDNN.
FEWEST_ELEMENTS = 1 << 23
MOST_ELEMENTS = 1 << 29


def takes(qkv: Tensor, sequences: int, length: int) -> bool:
    """Whether cuDNN is asked first."""
    total, _, heads, head_dim = qkv.shape
    return (
        total == sequences * length
        and length >= SHORTEST
        and FEWEST_ELEMENTS <= total * heads * head_dim < MOST_ELEMENTS
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


def split(qkv: Tensor, sequences: int, length: int) -> tuple[Tensor, ...]:
    """Queries, keys and values [sequences, H, length, D]."""
    return qkv.view(sequences, length, *qkv.shape[1:]).permute(2, 0, 3, 1, 4).unbind(0)


def forward(query: Tensor, key: Tensor, value: Tensor, saves: bool) -> tuple[Tensor, Tensor | None]:
    """Output [total, H, D] and, if it `saves` it, the logarithm of the sum of exponentials of each row."""
    output, logsumexp, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(query, key, value, None, saves)
    sequences, heads, length, head_dim = output.shape
    # Detached: a view that an autograd Function returns could not be changed in place.
    return output.transpose(1, 2).reshape(sequences * length, heads, head_dim).detach(), logsumexp if saves else None
