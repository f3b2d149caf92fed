"""Softmax cross-entropy, of logits and of a linear layer's outputs that are never all there."""

from . import library_ops  # noqa: F401  registers torch.ops.apex.xentropy_* and linear_xentropy
from .linear import linear_cross_entropy
from .op import FAMILY, NO_PADDING, backward_from_saved, forward_and_save, xentropy_backward, xentropy_forward

__all__ = [
    "FAMILY",
    "NO_PADDING",
    "backward_from_saved",
    "forward_and_save",
    "linear_cross_entropy",
    "xentropy_backward",
    "xentropy_forward",
]
