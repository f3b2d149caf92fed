"""Softmax cross-entropy of logits, and of a linear layer's outputs without materialising all of them."""

from .head import TokenOutputs
from .linear import linear_cross_entropy
from .log_probs import linear_log_probs
from .op import FAMILY, XENTROPY, check_logits, xentropy_backward, xentropy_forward
from .reference import NO_PADDING
from .token_loss import chunked_logits_loss, linear_token_loss
