"""Batch norm, with an addend and ReLU behind it."""

from .op import BatchNormFunction, batch_norm
from .spec import BatchNormSpec
from .stages import FAMILY, gradient_sums, gradients, input_gradient, local_statistics, normalise

__all__ = [
    "FAMILY",
    "BatchNormFunction",
    "BatchNormSpec",
    "batch_norm",
    "gradient_sums",
    "gradients",
    "input_gradient",
    "local_statistics",
    "normalise",
]
