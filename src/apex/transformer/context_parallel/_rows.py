"""The rows of packed sequences that a context-parallel rank holds.

Sequences are rows `bounds[i]` to `bounds[i + 1]` of all rows. A dense batch is the case of equal lengths. Everything is
computed on the device of `bounds`, so that the host does not wait.
"""

from __future__ import annotations

import torch
from torch import Tensor


def equal_bounds(sequences: int, length: int, device: torch.device) -> Tensor:
    """Return the bounds of `sequences` of the same length."""
    return torch.arange(0, sequences + 1, dtype=torch.int64, device=device) * length


def rows_of_chunks(bounds: Tensor, total: int, chunks: int, first: int, last: int) -> Tensor:
    """Return the rows of chunks `first` to `last` - 1 of every sequence, if each is cut into `chunks` of equal length.

    `total` is the number of rows of all sequences together.
    """
    taken = last - first
    document, offset = _sequence_and_number(bounds * taken // chunks, total * taken // chunks)
    lengths = bounds.diff()
    return bounds[document] + lengths[document] * first // chunks + offset


def rows_of_rank(bounds: Tensor, total: int, ranks: int, rank: int) -> Tensor:
    """Return the rows of chunks `rank` and 2 * `ranks` - 1 - `rank` of every sequence, in the order a rank has them."""
    document, offset = _sequence_and_number(bounds // ranks, total // ranks)
    chunk = bounds.diff()[document] // (2 * ranks)
    second = offset >= chunk
    number = torch.where(second, 2 * ranks - 1 - rank, rank)
    return bounds[document] + number * chunk + torch.where(second, offset - chunk, offset)


def rows_of_all_ranks(bounds: Tensor, total: int, ranks: int) -> Tensor:
    """Return the rows of rank 0, 1, ... one after the other."""
    return torch.cat([rows_of_rank(bounds, total, ranks, rank) for rank in range(ranks)])


def _sequence_and_number(bounds: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the sequence of each of `total` rows, and the row's number within its sequence."""
    rows = torch.arange(total, dtype=bounds.dtype, device=bounds.device)
    sequence = torch.searchsorted(bounds, rows, right=True) - 1
    sequence = sequence.clamp(0, max(0, bounds.shape[0] - 2))
    return sequence, rows - bounds[sequence]


def positions(bounds: Tensor, rows: Tensor) -> Tensor:
    """Return the number of each row within its sequence."""
    document = (torch.searchsorted(bounds, rows, right=True) - 1).clamp(0, max(0, bounds.shape[0] - 2))
    return rows - bounds[document]
