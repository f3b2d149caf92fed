"""FastLayerNorm, for any hidden size."""

from .layer_norm import FastLayerNorm

__all__ = ["FastLayerNorm"]
