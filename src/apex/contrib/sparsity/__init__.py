"""Structured sparsity: prunes to 2 of 4 weights and searches for the channel order that loses least."""

from .asp import ASP
from .sparse_masklib import WandaMask, create_mask

__all__ = ["ASP", "WandaMask", "create_mask"]
