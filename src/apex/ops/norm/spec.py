"""What a norm computes, beside its tensors."""

from __future__ import annotations

from typing import NamedTuple


class NormSpec(NamedTuple):
    """Layer norm or RMS norm (`subtract_mean` or not) of rows of `row_length` elements.

    `from_output`: the backward pass gets the output of the norm in place of its input (`memory_efficient`).
    """

    row_length: int
    eps: float
    subtract_mean: bool
    from_output: bool = False
