"""Gated linear units: SwiGLU, GeGLU and ReGLU, with or without a bias."""

from .op import FAMILY, GLU, bias_glu, check
from .reference import ACTIVATIONS

__all__ = ["ACTIVATIONS", "FAMILY", "GLU", "bias_glu", "check"]
