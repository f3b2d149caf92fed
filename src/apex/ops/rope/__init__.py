"""Rotary position embeddings."""

from . import library_ops  # noqa: F401  registers torch.ops.apex.rope and rope_pair
from .op import (
    FAMILY,
    RotateFunction,
    RotatePairFunction,
    backward_from_saved,
    forward_and_save,
    rotary_embedding,
    rotary_embedding_pair,
    rotate,
    rotate_now,
    rotate_pair,
)
from .spec import RopeSpec

__all__ = [
    "FAMILY",
    "RopeSpec",
    "RotateFunction",
    "RotatePairFunction",
    "backward_from_saved",
    "forward_and_save",
    "rotary_embedding",
    "rotary_embedding_pair",
    "rotate",
    "rotate_now",
    "rotate_pair",
]
