"""Upstream's compiled module of this name: attention within packed sequences, without autograd.

`qkv` is [total, 3, heads, head size], `cu_seqlens` the first row of each sequence and the end of the last. The second
result of `fwd` is for `bwd`: one tensor of bytes with everything that the backward pass needs. Upstream returns
matrices of probabilities instead, whose memory grows with the square of the lengths.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from apex.ops.attention import op_packed

# Parts of the bytes start at multiples of this number, so that kernels load them fastest.
_ALIGNMENT = 16


def fwd(qkv, cu_seqlens, p_dropout, max_seq_len, is_training, is_nl, zero_tensors, gen_=None) -> list[Tensor]:
    """Return [output, bytes for `bwd`]. `is_nl`, upstream's choice of a kernel for few sequences, has no effect."""
    dropout_p = p_dropout if is_training else 0.0
    op_packed.check(qkv, cu_seqlens, max_seq_len, dropout_p)
    seed = op_packed.draw_seed(qkv.device, gen_) if dropout_p > 0 else None
    with torch.no_grad():
        if not is_training:
            settings = op_packed.settings_of(qkv, cu_seqlens, max_seq_len, dropout_p, zero_tensors)
            return [op_packed.inference(qkv, cu_seqlens, seed, *settings), qkv.new_empty(0, dtype=torch.uint8)]
        output, statistics = op_packed.PACKED_ATTENTION.run(
            qkv, cu_seqlens, seed, max_seq_len, dropout_p, zero_tensors, False
        )
        if seed is None:
            seed = torch.zeros(1, dtype=torch.int64, device=qkv.device)
        return [output, torch.cat([_bytes(part) for part in (seed, statistics, output)])]


def bwd(dout, qkv, softmax, cu_seqlens, p_dropout, max_seq_len, zero_tensors) -> list[Tensor]:
    """Return [gradient of qkv, `softmax`]; `softmax` is the second result of `fwd` and is not changed."""
    op_packed.check(qkv, cu_seqlens, max_seq_len, p_dropout)
    total, _, heads, head_dim = qkv.shape
    layout = [((1,), torch.int64), ((heads, total), torch.float32), ((total, heads, head_dim), qkv.dtype)]
    sizes = [_padded(math.prod(shape) * dtype.itemsize) for shape, dtype in layout]
    if softmax.dtype != torch.uint8 or softmax.numel() != sum(sizes):
        raise ValueError(
            f"softmax is {list(softmax.shape)} of {softmax.dtype}; it must be what fwd returned for this qkv with "
            "is_training=True"
        )
    with torch.no_grad():
        seed, statistics, output = (
            part[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for part, (shape, dtype) in zip(softmax.split(sizes), layout, strict=True)
        )
        (dqkv,) = op_packed.PACKED_ATTENTION.run_backward(
            [dout.reshape(total, heads, head_dim)],
            [qkv, cu_seqlens, seed if p_dropout > 0 else None, output, statistics],
            [max_seq_len, p_dropout, zero_tensors, False],
            [True],
        )
    return [dqkv, softmax]


def bwd_nl(dout, qkv, softmax, cu_seqlens, p_dropout, max_seq_len, zero_tensors) -> list[Tensor]:
    """Return the results of `bwd` and the gradients of keys and values, [total, 1, 2, heads, head size].

    Upstream's third result is partial sums of these gradients.
    """
    dqkv, softmax = bwd(dout, qkv, softmax, cu_seqlens, p_dropout, max_seq_len, zero_tensors)
    return [dqkv, softmax, dqkv[:, None, 1:]]


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _bytes(part: Tensor) -> Tensor:
    values = part.contiguous().reshape(-1).view(torch.uint8)
    return torch.nn.functional.pad(values, (0, _padded(values.numel()) - values.numel()))
