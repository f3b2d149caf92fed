"""FMHA: self-attention of sequences of different lengths, packed one after the other without padding."""

from __future__ import annotations

import operator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ...ops._checks import check_tensors
from ...ops.attention import op_packed, packed_attention


class FMHAFun(torch.autograd.Function):
    """The autograd node of attention within packed sequences.

    Maps `qkv` [total, 3, heads, head size] to [total, heads, head size]. Sequence i is rows `cu_seqlens[i]` to
    `cu_seqlens[i + 1]`; none is longer than `max_s`. If `is_training`, attention probabilities are dropped with
    probability `p_dropout`. With `zero_tensors`, rows after the last sequence are zero in the output and in the
    gradient; otherwise they are undefined.
    """

    @staticmethod
    def forward(ctx, qkv, cu_seqlens, p_dropout, max_s, is_training, zero_tensors):  # type: ignore[override]
        dropout_p = p_dropout if is_training else 0.0
        op_packed.check(qkv, cu_seqlens, max_s, dropout_p)
        seed = op_packed.draw_seed(qkv.device) if dropout_p > 0 else None
        settings = op_packed.settings_of(qkv, cu_seqlens, max_s, dropout_p, zero_tensors)
        return op_packed.PACKED_ATTENTION.forward_and_save(ctx, qkv, cu_seqlens, seed, *settings)

    @staticmethod
    def backward(ctx, dout):  # type: ignore[override]
        return *op_packed.PACKED_ATTENTION.backward_from_saved(ctx, dout), None, None, None, None, None


class FMHA(nn.Module):
    """Self-attention with the sizes of a BERT configuration.

    `config` has `hidden_size`, `num_attention_heads` and `attention_probs_dropout_prob`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.p_dropout = config.attention_probs_dropout_prob
        self.h = config.num_attention_heads
        self.hidden_size = config.hidden_size
        self.d = self.hidden_size // max(self.h, 1)
        if self.h < 1 or self.d * self.h != self.hidden_size:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.h}; every head has as "
                "many elements as any other"
            )

    def forward(
        self, qkv: Tensor, cu_seqlens: Tensor, max_s: int, is_training: bool = True, zero_tensors: bool = False
    ) -> Tensor:
        """Map `qkv` [total, 3 * hidden size], ordered queries, keys, values, to [total, hidden size]."""
        check_tensors(qkv=qkv)
        if 3 * self.hidden_size not in accumulate(reversed(qkv.shape), operator.mul):  # whole rows, in any dimensions
            expected = f"[total, 3 * hidden_size = {3 * self.hidden_size}]"
            raise ValueError(f"qkv has shape {list(qkv.shape)}, expected {expected}")
        context = packed_attention(
            qkv.view(-1, 3, self.h, self.d),
            cu_seqlens,
            max_s,
            self.p_dropout if is_training else 0.0,
            zero_tail=zero_tensors,
        )
        return context.view(-1, self.hidden_size)
