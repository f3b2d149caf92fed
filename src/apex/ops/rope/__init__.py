"""Rotary position embeddings."""

from .op import (
    FAMILY,
    backward_from_saved,
    forward_and_save,
    rotary_embedding,
    rotary_embedding_pair,
    rotate,
    rotate_now,
)
from .reference import RopeSpec
