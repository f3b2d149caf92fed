"""What a group norm computes, beside its tensors."""

from __future__ import annotations

from typing import NamedTuple


class GroupNormSpec(NamedTuple):
    """Groups of channels, what is added to a variance, and whether SiLU follows."""

    groups: int
    eps: float
    silu: bool
