"""Softmax cross-entropy of logits, and of a linear layer's outputs without materialising all of them."""

from .linear import linear_cross_entropy
from .op import FAMILY, XENTROPY, check_logits, xentropy_backward, xentropy_forward
from .reference import NO_PADDING
