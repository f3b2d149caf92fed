"""Upstream's compiled module of this name: softmax cross-entropy, forward and backward, without autograd.

Losses and log-sum-exps are float32 (float64 for float64 logits), regardless of `half_to_float`.
"""

from __future__ import annotations

from torch import Tensor

from apex.ops.xentropy import xentropy_backward, xentropy_forward


def forward(input: Tensor, labels: Tensor, smoothing: float, half_to_float: bool) -> list[Tensor]:
    """Return [losses, max_log_sum_exp], one of each per row."""
    return list(xentropy_forward(input, labels, smoothing))


def backward(grad_loss: Tensor, logits: Tensor, max_log_sum_exp: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Return the gradient of the logits."""
    return xentropy_backward(grad_loss, logits, max_log_sum_exp, labels, smoothing)
