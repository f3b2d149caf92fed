"""Softmax of attention logits with a mask per batch element, followed by dropout."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import multihead, softmax
from ...ops._checks import check_floats, check_optional_tensors, integer, number
from ...ops._library import once_differentiable


class MaskSoftmaxDropout(torch.autograd.Function):
    """The autograd node of masked softmax and dropout.

    `inputs` are [batch * heads, queries, keys], `pad_mask` is [batch, keys]. A nonzero mask element hides a key; with
    `mask_additive` the mask is added to the logits instead. A row whose keys are all hidden becomes zero. Dropout
    applies only if `is_training`.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx,
        is_training: bool,
        heads: int,
        inputs: Tensor,
        pad_mask: Tensor | None,
        mask_additive: bool,
        dropout_prob: float,
    ) -> Tensor:
        check_floats(inputs=inputs)
        check_optional_tensors(pad_mask=pad_mask)
        if inputs.dim() != 3 or integer("heads", heads) < 1 or inputs.shape[0] % heads:
            raise ValueError(
                f"inputs of shape {list(inputs.shape)} must be [batch * heads, queries, keys] with heads={heads}"
            )
        batch, (queries, keys) = inputs.shape[0] // heads, inputs.shape[1:]
        if pad_mask is not None and pad_mask.shape != (batch, keys):
            raise ValueError(f"pad_mask has shape {list(pad_mask.shape)}, expected [batch, keys] = {[batch, keys]}")
        dropout = number("dropout_prob", dropout_prob)
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout_prob={dropout} must be a probability, between 0 and 1")
        mask = multihead.make_mask(pad_mask, use_time_mask=False, additive=mask_additive)
        multihead.check_mask(mask, queries, keys, batch, inputs.device)
        cover = multihead.broadcastable(mask, queries, keys, inputs.device)
        spec = softmax.SoftmaxSpec(dropout=dropout if is_training else 0.0)
        logits = inputs.reshape(batch, heads, queries, keys)
        softmax.check_arguments(logits, cover, spec)
        noise = softmax.draw_noise(logits, spec)
        output = softmax.SOFTMAX.forward_and_save(ctx, logits, cover, noise, *spec)
        return output.detach().view(inputs.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, output_grads: Tensor):  # type: ignore[override]
        gradient = output_grads.reshape(ctx.saved_tensors[0].shape)
        (dx,) = softmax.SOFTMAX.backward_from_saved(ctx, gradient, wanted=(True,))
        assert dx is not None
        return None, None, dx.view(output_grads.shape), None, None, None


fast_mask_softmax_dropout_func = MaskSoftmaxDropout.apply
