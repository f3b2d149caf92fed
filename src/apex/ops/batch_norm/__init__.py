"""Batch norm followed by an optional addend and ReLU, or by SiLU, over the inputs of one process or of several."""

from .op import (
    average_factor,
    backward,
    batch_norm,
    batch_norm_with_statistics,
    check,
    check_values,
    forward,
    save,
    saved_gradients,
)
from .passes import FAMILY, input_gradient, local_gradients, normalise, rank_statistics, statistics
from .reference import BatchNormSpec, BatchStatistics, Channels, Exchange, GradientSums
