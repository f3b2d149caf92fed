"""Shares of columns in PyTorch operators: the definition, and the implementation where there is no kernel.

A stripe is 4 neighbouring columns, of which 2:4 pruning keeps the two largest absolute values in every row. A window of
w columns, w / 4 stripes, can be shared among its stripes in w! / (4!^(w/4) (w/4)!) ways, called splits: 35 for 8
columns, 5775 for 12. Split 0 leaves the columns as they are.

    columns  float [C, R]   absolute values; a row holds a column of the weight
    windows  int64 [N, w]   numbers of the columns of each window
"""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import Tensor

from .._host import HOST

# Elements of one column of all windows that are computed at once. With 8 columns 66 arrays of this size are at work:
# on a CPU they stay in its second-level cache, elsewhere they fill the device.
_CHUNK_ON_HOST, _CHUNK = 1 << 13, 1 << 21


def split_count(width: int) -> int:
    """How many splits a window of so many columns has."""
    stripes = width // 4
    return math.factorial(width) // (24**stripes * math.factorial(stripes))


@functools.cache
def window_splits(width: int) -> Tensor:
    """All splits of a window, int64 [splits, width]: the columns in their new order."""
    if width == 4:
        return torch.arange(4, dtype=torch.int64, device=HOST)[None]
    rest_splits, found = window_splits(width - 4), []
    for chosen in itertools.combinations(range(1, width), 3):
        rest = [column for column in range(1, width) if column not in chosen]
        first = torch.tensor((0, *chosen), dtype=torch.int64, device=HOST).expand(len(rest_splits), 4)
        found.append(torch.cat((first, torch.tensor(rest, dtype=torch.int64, device=HOST)[rest_splits]), 1))
    return torch.cat(found)


@functools.cache
def _numbers_of_subsets(width: int) -> Tensor:
    """The number of each subset of 4 columns in lexicographic order, int64 [width, width, width, width]."""
    number = torch.zeros((width,) * 4, dtype=torch.int64, device=HOST)
    for index, subset in enumerate(itertools.combinations(range(width), 4)):
        number[subset] = index
    return number


def subset_sums(columns: Tensor, windows: Tensor) -> Tensor:
    """What 2:4 pruning keeps of every subset of 4 columns of each window, [subsets, N], in lexicographic order.

    The two largest of a < b < c < d add up to max(max(a, b) + max(c, d), a + b, c + d). Sums and maxima of pairs are
    computed once; the pairs (c, d) that can follow (a, b) are the last ones in lexicographic order.
    """
    width, rows = windows.shape[1], columns.shape[1]
    chunk = _CHUNK_ON_HOST if columns.device == HOST else _CHUNK
    tails = [math.comb(width, 2) - math.comb(width - 1 - b, 2) for b in range(width)]
    found = []
    for part in windows.split(max(1, chunk // max(1, rows))):
        values = columns[part.t()]  # [width, part, rows]
        sums = torch.cat([values[i] + values[i + 1 :] for i in range(width - 1)])
        largest = torch.cat([torch.maximum(values[i], values[i + 1 :]) for i in range(width - 1)])
        totals = []
        for pair, (_, b) in enumerate(itertools.combinations(range(width), 2)):
            if b < width - 2:
                kept = torch.maximum(sums[tails[b] :], sums[pair])
                totals.append(torch.maximum(kept, largest[tails[b] :] + largest[pair]).sum(2))
        found.append(torch.cat(totals))
    return torch.cat(found, 1)


def kept_by_orders(columns: Tensor, windows: Tensor, orders: Tensor) -> Tensor:
    """What 2:4 pruning keeps of each window with its columns in each of some orders, [orders, N]."""
    width = windows.shape[1]
    stripes = orders.to(HOST).view(-1, width // 4, 4).sort(2).values
    numbers = _numbers_of_subsets(width)[tuple(stripes.unbind(2))].to(columns.device)
    sums = subset_sums(columns, windows)
    totals = sums[numbers[:, 0]]
    for stripe in range(1, width // 4):
        totals += sums[numbers[:, stripe]]
    return totals


def best_splits(columns: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
    """For each window what its best split keeps more than split 0, [N], and that split's number, int64 [N].

    Of equally good splits it is the first.
    """
    splits = window_splits(windows.shape[1])
    numbers = torch.arange(len(splits), dtype=torch.int64, device=columns.device)[:, None]
    gains, best = [], []
    for part in windows.split(max(1, (1 << 24) // len(splits))):
        totals = kept_by_orders(columns, part, splits)
        top = totals.amax(0)
        best.append(torch.where(totals == top, numbers, len(splits) - 1).amin(0))
        gains.append(top - totals[0])
    return torch.cat(gains), torch.cat(best)


def kept_magnitude(columns: Tensor) -> Tensor:
    """What 2:4 pruning keeps of the columns in this order, in every stripe, float64 [C / 4]."""
    a, b, c, d = columns.view(-1, 4, columns.shape[1]).unbind(1)
    kept = torch.maximum(torch.maximum(a, b) + torch.maximum(c, d), torch.maximum(a + b, c + d))
    return kept.sum(1, dtype=torch.float64)
