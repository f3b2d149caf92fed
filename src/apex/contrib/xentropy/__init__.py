"""Softmax cross-entropy with label smoothing, for logits and for a linear layer's outputs."""

from .linear_cross_entropy import LinearCrossEntropyLoss, TokenOutputs, linear_cross_entropy, linear_log_probs
from .softmax_xentropy import SoftmaxCrossEntropyLoss

__all__ = [
    "LinearCrossEntropyLoss",
    "SoftmaxCrossEntropyLoss",
    "TokenOutputs",
    "linear_cross_entropy",
    "linear_log_probs",
]
