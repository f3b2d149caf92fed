"""Norms that mark their parameters for sequence parallelism."""

from .layer_norm import FastLayerNorm, FusedLayerNorm, MixedFusedLayerNorm

__all__ = ["FastLayerNorm", "FusedLayerNorm", "MixedFusedLayerNorm"]
