"""The positions of a context-parallel rank's rows within their sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from ..packed_seq_params import PackedSeqParams
from ._parts import own_chunks, size_and_rank
from ._rows import positions, rows_of_rank


def positions_of(length: int, packed: PackedSeqParams | None, device: torch.device) -> Tensor:
    """Return the positions of this rank's `length` rows, which count from 0 in each sequence or packed document."""
    ranks, rank = size_and_rank(None)
    total = length * ranks
    rows = torch.arange(total, dtype=torch.int64, device=device)
    if packed is None:
        return rows if ranks == 1 else own_chunks(rows, 0, ranks, rank)
    bounds = packed.bounds()[0].to(device, torch.int64)
    if ranks > 1:
        rows = rows_of_rank(bounds, total, ranks, rank)
    return positions(bounds, rows)
