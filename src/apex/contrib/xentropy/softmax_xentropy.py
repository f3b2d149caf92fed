"""Softmax cross-entropy with label smoothing, under upstream's name."""

from __future__ import annotations

import torch

from ...ops._library import eager_apply
from ...ops.xentropy import XENTROPY, check_logits


class SoftmaxCrossEntropyLoss(torch.autograd.Function):
    """The loss of each row of logits, in float32: `SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, ...)`.

    Rows whose label is `padding_idx` have loss and gradient zero. `half_to_float` asks upstream for float32 losses of
    half-precision logits; here they are float32 in any case.
    """

    @staticmethod
    def forward(ctx, logits, labels, smoothing=0.0, padding_idx=0, half_to_float=False):  # type: ignore[override]
        check_logits(logits, labels, smoothing)
        return XENTROPY.forward_and_save(ctx, logits, labels, float(smoothing), padding_idx)

    @staticmethod
    def backward(ctx, grad_loss):  # type: ignore[override]
        return *XENTROPY.backward_from_saved(ctx, grad_loss), None, None, None, None


eager_apply(SoftmaxCrossEntropyLoss)  # its nodes call `backward` directly
