"""Batch norm, with an addend and ReLU behind it."""

from .autograd import BatchNormFunction
from .layout import laid_out_like
from .op import average_factor, batch_norm, batch_norm_with_statistics
from .spec import BatchNormSpec, BatchStatistics
from .stages import (
    FAMILY,
    direct_norm,
    gradient_packet,
    gradient_sums,
    gradients,
    input_gradient,
    joined_input_gradient,
    joined_statistics,
    local_statistics,
    normalise,
    statistics_packet,
)

__all__ = [
    "FAMILY",
    "BatchNormFunction",
    "BatchNormSpec",
    "BatchStatistics",
    "average_factor",
    "batch_norm",
    "batch_norm_with_statistics",
    "direct_norm",
    "gradient_packet",
    "gradient_sums",
    "gradients",
    "input_gradient",
    "joined_input_gradient",
    "joined_statistics",
    "laid_out_like",
    "local_statistics",
    "normalise",
    "statistics_packet",
]
