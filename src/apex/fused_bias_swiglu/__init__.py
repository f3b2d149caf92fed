"""SwiGLU with a bias in one kernel, and its relatives GeGLU and ReGLU."""

from .fused_bias_swiglu import fused_bias_geglu, fused_bias_reglu, fused_bias_swiglu

__all__ = ["fused_bias_geglu", "fused_bias_reglu", "fused_bias_swiglu"]
