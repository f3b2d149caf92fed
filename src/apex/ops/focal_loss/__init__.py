"""Focal loss of dense detectors, with label smoothing and padded classes."""

from . import library_ops  # noqa: F401  registers torch.ops.apex.focal_loss*
from .op import (
    FAMILY,
    backward_from_saved,
    check,
    focal_loss_and_gradient,
    focal_loss_backward,
    focal_loss_forward,
    forward_and_save,
)
from .reference import FocalSpec

__all__ = [
    "FAMILY",
    "FocalSpec",
    "backward_from_saved",
    "check",
    "focal_loss_and_gradient",
    "focal_loss_backward",
    "focal_loss_forward",
    "forward_and_save",
]
