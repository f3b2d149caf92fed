"""Attention within packed sequences, for any head size and length."""

from .fmha import FMHA, FMHAFun

__all__ = ["FMHA", "FMHAFun"]
