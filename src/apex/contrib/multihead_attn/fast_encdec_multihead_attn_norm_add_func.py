"""Attention of the layer norm of one sequence to another, added to the first."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...ops import multihead
from ._graph import backward_through_graph, forward_with_graph


class FastEncdecAttnNormAddFunc(torch.autograd.Function):
    """`inputs_q` + dropout(`FastEncdecAttnFunc` of their layer norm to `inputs_kv`)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx,
        use_time_mask: bool,
        is_training: bool,
        heads: int,
        inputs_q: Tensor,
        inputs_kv: Tensor,
        lyr_nrm_gamma_weights: Tensor,
        lyr_nrm_beta_weights: Tensor,
        input_weights_q: Tensor,
        input_weights_kv: Tensor,
        output_weights: Tensor,
        pad_mask: Tensor | None,
        dropout_prob: float,
    ) -> Tensor:
        mask = multihead.make_mask(pad_mask, use_time_mask, additive=False)
        dropout = dropout_prob if is_training else 0.0
        compute = functools.partial(multihead.encdec_attention_norm_add, heads=heads, mask=mask, dropout=dropout)
        norm = lyr_nrm_gamma_weights, lyr_nrm_beta_weights
        tensors = inputs_q, inputs_kv, *norm, input_weights_q, input_weights_kv, output_weights
        return forward_with_graph(ctx, compute, tensors, ctx.needs_input_grad[3:10])

    @staticmethod
    def backward(ctx, output_grads: Tensor):  # type: ignore[override]
        return None, None, None, *backward_through_graph(ctx, output_grads), None, None


fast_encdec_attn_norm_add_func = FastEncdecAttnNormAddFunc.apply
