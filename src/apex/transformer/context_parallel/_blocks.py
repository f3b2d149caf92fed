"""Outputs and gradients of a ring's blocks, merged a few at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops._library import compute_dtype
from ...ops.attention.op_blocks import MOST_PARTS, Part, merge_parts


class Merged:
    """A sum of blocks' outputs, weighted by each block's share of the exponentials, or a plain sum of gradients.

    Blocks are kept until there are `MOST_PARTS`, because a pass over memory for each block would take longer. Sums are
    in float32 or wider. A partial block has results of some rows only: `places[i]` is the index of row i among them,
    -1 if the block has none.
    """

    def __init__(self, places: Tensor | None) -> None:
        self.places = places
        self.parts: list[Part] = []

    def add(self, result: Tensor, lse: Tensor | None, partial: bool) -> None:
        """Add a block's results of all rows, or of some of them; without `lse` results are added unweighted."""
        if len(self.parts) == MOST_PARTS:
            self.parts = [Part(*merge_parts(self.parts, self.places, compute_dtype(result)), False)]
        self.parts.append(Part(result, lse, partial))

    def results(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return the results in `dtype`, and the logs of sums [H, rows] of outputs."""
        return merge_parts(self.parts, self.places, dtype)
