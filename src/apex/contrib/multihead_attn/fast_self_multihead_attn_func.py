"""Self attention through PyTorch's fused attention."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...ops import multihead
from ._graph import backward_through_graph, forward_with_graph


class FastSelfAttnFunc(torch.autograd.Function):
    """As `SelfAttnFunc` with the scale of the head's size; the logits are never stored."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx,
        use_time_mask: bool,
        is_training: bool,
        heads: int,
        inputs: Tensor,
        input_weights: Tensor,
        output_weights: Tensor,
        input_biases: Tensor | None,
        output_biases: Tensor | None,
        pad_mask: Tensor | None,
        mask_additive: bool,
        dropout_prob: float,
    ) -> Tensor:
        mask = multihead.make_mask(pad_mask, use_time_mask, mask_additive)
        dropout = dropout_prob if is_training else 0.0
        compute = functools.partial(multihead.self_attention, heads=heads, mask=mask, dropout=dropout)
        tensors = inputs, input_weights, output_weights, input_biases, output_biases
        return forward_with_graph(ctx, compute, tensors, ctx.needs_input_grad[3:8])

    @staticmethod
    def backward(ctx, output_grads: Tensor):  # type: ignore[override]
        return None, None, None, *backward_through_graph(ctx, output_grads), None, None, None


fast_self_attn_func = FastSelfAttnFunc.apply
