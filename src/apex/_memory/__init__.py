"""Estimates of the GPU memory that a training run needs."""

from __future__ import annotations

from .estimate import Memory, estimate_memory

__all__ = ["Memory", "estimate_memory"]
