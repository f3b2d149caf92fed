"""Fused optimizers: each step is one pass over all parameters, or as few as the algorithm allows."""

from .fused_adam import FusedAdam

__all__ = ["FusedAdam"]
