"""Softmax cross-entropy with label smoothing, of logits and of a linear layer's outputs."""

from .linear_cross_entropy import LinearCrossEntropyLoss, linear_cross_entropy
from .softmax_xentropy import SoftmaxCrossEntropyLoss

__all__ = ["LinearCrossEntropyLoss", "SoftmaxCrossEntropyLoss", "linear_cross_entropy"]
