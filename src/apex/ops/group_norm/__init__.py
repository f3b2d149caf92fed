"""Group norm of channels-last tensors, with or without SiLU."""

from .op import FAMILY, GroupNormFunction, group_norm, group_norm_backward, group_norm_forward
from .spec import GroupNormSpec

__all__ = [
    "FAMILY",
    "GroupNormFunction",
    "GroupNormSpec",
    "group_norm",
    "group_norm_backward",
    "group_norm_forward",
]
