"""Layer norm and RMS norm."""

from . import library_ops  # noqa: F401  registers torch.ops.apex.norm_*
from .op import (
    FAMILY,
    NormFunction,
    backward_from_saved,
    forward_and_save,
    layer_norm,
    norm_backward,
    norm_forward,
    rms_norm,
)

__all__ = [
    "FAMILY",
    "NormFunction",
    "backward_from_saved",
    "forward_and_save",
    "layer_norm",
    "norm_backward",
    "norm_forward",
    "rms_norm",
]
