"""Gated linear units: SwiGLU, GeGLU and ReGLU, with or without a bias."""

from .op import FAMILY, GLU, GLU_PAIR, bias_glu, check, glu_pair
from .reference import ACTIVATIONS
