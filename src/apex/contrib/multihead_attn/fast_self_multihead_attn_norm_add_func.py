"""Self attention of the layer norm of its input, added to the input."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...ops import multihead
from ._graph import backward_through_graph, forward_with_graph


class FastSelfAttnNormAddFunc(torch.autograd.Function):
    """`inputs` + dropout(`FastSelfAttnFunc` of their layer norm), without biases."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx,
        use_time_mask: bool,
        is_training: bool,
        heads: int,
        inputs: Tensor,
        lyr_nrm_gamma_weights: Tensor,
        lyr_nrm_beta_weights: Tensor,
        input_weights: Tensor,
        output_weights: Tensor,
        pad_mask: Tensor | None,
        dropout_prob: float,
    ) -> Tensor:
        mask = multihead.make_mask(pad_mask, use_time_mask, additive=False)
        dropout = dropout_prob if is_training else 0.0
        compute = functools.partial(multihead.self_attention_norm_add, heads=heads, mask=mask, dropout=dropout)
        tensors = inputs, lyr_nrm_gamma_weights, lyr_nrm_beta_weights, input_weights, output_weights
        return forward_with_graph(ctx, compute, tensors, ctx.needs_input_grad[3:8])

    @staticmethod
    def backward(ctx, output_grads: Tensor):  # type: ignore[override]
        return None, None, None, *backward_through_graph(ctx, output_grads), None, None


fast_self_attn_norm_add_func = FastSelfAttnNormAddFunc.apply
