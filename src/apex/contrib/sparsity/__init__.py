"""Structured sparsity: 2 of 4 weights, with a search for the order of channels that loses least."""

from .asp import ASP
from .sparse_masklib import WandaMask, create_mask

__all__ = ["ASP", "WandaMask", "create_mask"]
