"""Scaled, masked softmax with dropout."""

from .op import (
    FAMILY,
    SOFTMAX,
    check_arguments,
    draw_noise,
    keep_mask,
    masked_softmax,
    softmax_backward,
    softmax_forward,
)
from .reference import SoftmaxSpec
