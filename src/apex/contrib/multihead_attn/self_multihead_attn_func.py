"""Self attention step by step, with a backward pass from what each step left."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import multihead
from ...ops._library import once_differentiable
from ...ops.multihead import explicit


class SelfAttnFunc(torch.autograd.Function):
    """Self attention of `inputs` [length, batch, embedding] with both projections.

    `mask` is [length, length] with `use_time_mask`, else [batch, length]. Dropout only if `is_training`.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx,
        use_time_mask: bool,
        is_training: bool,
        heads: int,
        scale: float,
        inputs: Tensor,
        input_weights: Tensor,
        output_weights: Tensor,
        input_biases: Tensor | None,
        output_biases: Tensor | None,
        mask: Tensor | None,
        is_additive_mask: bool,
        dropout_prob: float,
    ) -> Tensor:
        dropout = dropout_prob if is_training else 0.0
        tensors = explicit.in_autocast_dtype(inputs, input_weights, output_weights, input_biases, output_biases)
        cover = multihead.make_mask(mask, use_time_mask, is_additive_mask)
        outputs, packed, core = explicit.self_forward(*tensors, heads=heads, scale=scale, mask=cover, dropout=dropout)
        ctx.save_for_backward(*tensors[:3], packed, core.context, core.probabilities, core.dropped, core.noise)
        ctx.settings = heads, scale, dropout, input_biases is not None
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, output_grads: Tensor):  # type: ignore[override]
        gradients = explicit.self_backward(output_grads, *ctx.saved_tensors, *ctx.settings)
        return None, None, None, None, *gradients, None, None, None


self_attn_func = SelfAttnFunc.apply
