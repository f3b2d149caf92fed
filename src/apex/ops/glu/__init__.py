"""Gated linear units: SwiGLU, GeGLU and ReGLU, with or without a bias."""

from . import library_ops  # noqa: F401  registers torch.ops.apex.glu_*
from .op import FAMILY, GluFunction, bias_glu, check, glu_backward, glu_forward
from .reference import ACTIVATIONS

__all__ = ["ACTIVATIONS", "FAMILY", "GluFunction", "bias_glu", "check", "glu_backward", "glu_forward"]
