"""Scaled, masked softmax with dropout."""

from .op import (
    FAMILY,
    SOFTMAX,
    backward_from_saved,
    check_arguments,
    draw_noise,
    forward_and_save,
    keep_mask,
    masked_softmax,
    softmax_backward,
    softmax_forward,
)
from .reference import SoftmaxSpec
