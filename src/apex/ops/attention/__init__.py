"""Attention with a mask and a bias, and attention within packed sequences."""

from . import library_ops  # noqa: F401  registers torch.ops.apex.attention_* and packed_attention_*
from .biased import attention
from .family import FAMILY
from .packed import packed_attention

__all__ = ["FAMILY", "attention", "packed_attention"]
