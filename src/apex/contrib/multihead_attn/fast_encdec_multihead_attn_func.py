"""Attention of one sequence to another through PyTorch's fused attention."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...ops import multihead
from ._graph import backward_through_graph, forward_with_graph


class FastEncdecAttnFunc(torch.autograd.Function):
    """As `EncdecAttnFunc` with the scale of the head's size and without biases; the logits are never stored."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx,
        use_time_mask: bool,
        is_training: bool,
        heads: int,
        inputs_q: Tensor,
        inputs_kv: Tensor,
        input_weights_q: Tensor,
        input_weights_kv: Tensor,
        output_weights: Tensor,
        pad_mask: Tensor | None,
        dropout_prob: float,
    ) -> Tensor:
        mask = multihead.make_mask(pad_mask, use_time_mask, additive=False)
        dropout = dropout_prob if is_training else 0.0
        compute = functools.partial(multihead.encdec_attention, heads=heads, mask=mask, dropout=dropout)
        tensors = inputs_q, inputs_kv, input_weights_q, input_weights_kv, output_weights
        return forward_with_graph(ctx, compute, tensors, ctx.needs_input_grad[3:8])

    @staticmethod
    def backward(ctx, output_grads: Tensor):  # type: ignore[override]
        return None, None, None, *backward_through_graph(ctx, output_grads), None, None


fast_encdec_attn_func = FastEncdecAttnFunc.apply
