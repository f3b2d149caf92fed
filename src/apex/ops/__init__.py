"""Fused operators: one folder per family, one dispatch (`_library`), one launcher (`_launch`)."""

from ._library import FAMILIES, explain, implementation
from .norm import layer_norm, rms_norm

__all__ = ["FAMILIES", "explain", "implementation", "layer_norm", "rms_norm"]
