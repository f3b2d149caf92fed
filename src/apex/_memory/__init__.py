"""What a training run needs of a GPU's memory."""

from __future__ import annotations

from .estimate import Memory, estimate_memory

__all__ = ["Memory", "estimate_memory"]
