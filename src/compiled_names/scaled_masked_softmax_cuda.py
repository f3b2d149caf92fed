"""Upstream's compiled module of this name: softmax of scores [b, heads, queries, keys] under a mask, without autograd.

The mask is bool or uint8, nonzero where a key is hidden, and is broadcast to the scores.
"""

from __future__ import annotations

from torch import Tensor

from apex.ops.softmax import SoftmaxSpec, softmax_backward, softmax_forward
from apex.transformer.functional import FusedScaleMaskSoftmax


def forward(input: Tensor, mask: Tensor, scale_factor: float) -> Tensor:
    return softmax_forward(input, mask, SoftmaxSpec(float(scale_factor)))[0]


def backward(output_grads: Tensor, softmax_results: Tensor, scale_factor: float) -> Tensor:
    """Return the gradient of the input; `output_grads` is not changed."""
    return softmax_backward(output_grads, softmax_results, SoftmaxSpec(float(scale_factor)))


def get_batch_per_block(query_seq_len: int, key_seq_len: int, batches: int, attn_heads: int) -> int:
    """Return the number of rows that upstream's kernel processes per block of threads."""
    return FusedScaleMaskSoftmax.get_batch_per_block(query_seq_len, key_seq_len, batches, attn_heads)
