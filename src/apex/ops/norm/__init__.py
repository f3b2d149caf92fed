"""Layer norm and RMS norm."""

from . import library_ops  # noqa: F401  registers torch.ops.apex.norm_*
from .autograd import NormFunction, backward_from_saved, forward_and_save
from .dispatch import FAMILY, norm_backward, norm_forward
from .op import layer_norm, rms_norm
from .spec import NormSpec

__all__ = [
    "FAMILY",
    "NormFunction",
    "NormSpec",
    "backward_from_saved",
    "forward_and_save",
    "layer_norm",
    "norm_backward",
    "norm_forward",
    "rms_norm",
]
