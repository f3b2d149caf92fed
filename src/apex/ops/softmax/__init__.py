"""Scaled, masked softmax with dropout."""

from . import library_ops  # noqa: F401  registers torch.ops.apex.softmax_*
from .op import (
    FAMILY,
    SoftmaxFunction,
    backward_from_saved,
    check_arguments,
    draw_noise,
    forward_and_save,
    keep_mask,
    masked_softmax,
    softmax_backward,
    softmax_forward,
)
from .spec import SoftmaxSpec

__all__ = [
    "FAMILY",
    "SoftmaxFunction",
    "SoftmaxSpec",
    "backward_from_saved",
    "check_arguments",
    "draw_noise",
    "forward_and_save",
    "keep_mask",
    "masked_softmax",
    "softmax_backward",
    "softmax_forward",
]
