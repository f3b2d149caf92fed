"""Group norm of channels-last tensors, with or without SiLU."""

from .op import FAMILY, GROUP_NORM, group_norm, group_norm_backward, group_norm_forward
