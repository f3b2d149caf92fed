"""GroupNorm with an optional fused SiLU, for channels-last and contiguous tensors."""

from .group_norm import GroupNorm

__all__ = ["GroupNorm"]
