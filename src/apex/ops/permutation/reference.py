"""Division of columns into stripes in PyTorch operators: the definition, and the implementation when no kernel runs.

A stripe is 4 neighbouring columns; 2:4 pruning keeps its two largest absolute values in every row. A window of 8
columns, two stripes, can be divided between them in 35 ways, called splits; split 0 leaves the columns as they are.

    columns  float [C, R]   absolute values; a row holds a column of the weight
        windows  int64 [N, 8]   indices of the columns of each window
"""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import Tensor

from .._host import HOST

# Elements of one column of all windows that are computed at once, with 66 arrays of this size in use. On a CPU they
# stay in its second-level cache, elsewhere they fill the device.
_CHUNK_ON_HOST, _CHUNK = 1 << 13, 1 << 21


@functools.cache
def window_splits() -> Tensor:
    """Return all splits of a window, int64 [35, 8]: its columns in their new order. Column 0 is in the first stripe."""
    subsets = torch.combinations(torch.arange(8, dtype=torch.int64, device=HOST), 4)
    return torch.cat((subsets, subsets.flip(0)), 1)[:35]  # in reverse order, subsets are the complements


def subset_sums(columns: Tensor, windows: Tensor) -> Tensor:
    """Return the magnitude that 2:4 pruning keeps of every 4 columns of each window, [70, N], in lexicographic order.

    The two largest of a < b < c < d add up to max(max(a, b) + max(c, d), a + b, c + d). Sums and maxima of pairs are
    computed once; the pairs (c, d) that can follow (a, b) are the last ones in lexicographic order.
    """
    chunk = _CHUNK_ON_HOST if columns.device == HOST else _CHUNK
    parts = []
    for part in windows.split(max(1, chunk // max(1, columns.shape[1]))):
        values = columns[part.t()]  # [8, part, rows]
        sums = torch.cat([values[i] + values[i + 1 :] for i in range(7)])
        largest = torch.cat([torch.maximum(values[i], values[i + 1 :]) for i in range(7)])
        totals = []
        for pair, (_, b) in enumerate(itertools.combinations(range(8), 2)):
            if b < 6:
                following = slice(28 - math.comb(7 - b, 2), 28)
                kept = torch.maximum(sums[following], sums[pair])
                totals.append(torch.maximum(kept, largest[following] + largest[pair]).sum(2))
        parts.append(torch.cat(totals))
    return torch.cat(parts, 1)


def best_splits(columns: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Return how much more each window's best split keeps than split 0, [N], and that split's number, int64 [N].

    Among equally good splits it is the first.
    """
    sums = subset_sums(columns, windows)
    totals = sums[:35] + sums.flip(0)[:35]
    top = totals.amax(0)
    numbers = torch.arange(35, dtype=torch.int64, device=columns.device)[:, None]
    return top - totals[0], torch.where(totals == top, numbers, 34).amin(0)


def kept_magnitude(columns: Tensor) -> Tensor:
    """Return the magnitude that 2:4 pruning keeps of each stripe of the columns in this order, float64 [C / 4]."""
    a, b, c, d = columns.view(-1, 4, columns.shape[1]).unbind(1)
    kept = torch.maximum(torch.maximum(a, b) + torch.maximum(c, d), torch.maximum(a + b, c + d))
    return kept.sum(1, dtype=torch.float64)
