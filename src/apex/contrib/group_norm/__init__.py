"""GroupNorm for channels-last tensors, with SiLU fused into it."""

from .group_norm import GroupNorm

__all__ = ["GroupNorm"]
