"""Softmax cross-entropy with label smoothing, for logits and for a linear layer's outputs."""

from .linear_cross_entropy import LinearCrossEntropyLoss, linear_cross_entropy
from .softmax_xentropy import SoftmaxCrossEntropyLoss

__all__ = ["LinearCrossEntropyLoss", "SoftmaxCrossEntropyLoss", "linear_cross_entropy"]
