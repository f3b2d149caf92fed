"""Attention of one sequence to another step by step, with a backward pass from what each step left."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import multihead
from ...ops._library import once_differentiable
from ...ops.multihead import explicit


class EncdecAttnFunc(torch.autograd.Function):
    """Attention of `inputs_q` [queries, batch, embedding] to `inputs_kv` [keys, batch, embedding] with all projections.

    `mask` is [queries, keys] with `use_time_mask`, else [batch, keys]. Dropout only if `is_training`.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx,
        use_time_mask: bool,
        is_training: bool,
        heads: int,
        scale: float,
        inputs_q: Tensor,
        inputs_kv: Tensor,
        input_weights_q: Tensor,
        input_weights_kv: Tensor,
        output_weights: Tensor,
        input_biases_q: Tensor | None,
        input_biases_kv: Tensor | None,
        output_biases: Tensor | None,
        mask: Tensor | None,
        dropout_prob: float,
    ) -> Tensor:
        dropout = dropout_prob if is_training else 0.0
        weights = input_weights_q, input_weights_kv, output_weights
        biases = input_biases_q, input_biases_kv, output_biases
        tensors = explicit.in_autocast_dtype(inputs_q, inputs_kv, *weights, *biases)
        cover = multihead.make_mask(mask, use_time_mask, additive=False)
        outputs, projected, packed, core = explicit.encdec_forward(
            *tensors, heads=heads, scale=scale, mask=cover, dropout=dropout
        )
        results = projected, packed, core.context, core.probabilities, core.dropped, core.noise
        ctx.save_for_backward(*tensors[:5], *results)
        ctx.settings = heads, scale, dropout, input_biases_q is not None
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, output_grads: Tensor):  # type: ignore[override]
        gradients = explicit.encdec_backward(output_grads, *ctx.saved_tensors, *ctx.settings)
        return None, None, None, None, *gradients, None, None


encdec_attn_func = EncdecAttnFunc.apply
