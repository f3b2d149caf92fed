"""The compiled functions of the permutation search over numpy arrays; results are written to the caller's arrays.

A group is several stripes (of 4 columns) of the matrix; a permutation orders the columns of a group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from apex.contrib.sparsity.permutation_search_kernels.permutation_utilities import sum_after_2_to_4 as _kept
from apex.ops.permutation import kept_magnitude as _kept_magnitude


def _gains(matrix: Any, rows: int, cols: int, stripes: Any, width: int, orders: list[list[int]]) -> Tensor:
    """Return the gain of each order of the columns in each group of `width` stripes, [orders, groups]."""
    columns = torch.from_numpy(matrix.reshape(rows, cols)).abs().float().t()
    groups = columns.reshape(-1, 4, rows)[stripes.reshape(-1, width).astype("int64")].flatten(1, 2)
    every = [list(range(width * 4)), *orders]
    kept = [_kept_magnitude(groups[:, order].flatten(0, 1)).view(-1, width).sum(1) for order in every]
    return torch.stack(kept[1:]) - kept[0]


def sum_after_2_to_4(matrix, rows, cols, start_col, end_col, blocks, threads, output):  # type: ignore[no-untyped-def]
    """Write to output[0] the magnitude that 2:4 pruning keeps of the columns from `start_col` to `end_col`."""
    output.reshape(-1)[0] = _kept(matrix.reshape(rows, cols)[:, start_col:end_col])
    return 0


def build_permute_map(  # type: ignore[no-untyped-def]
    matrix, rows, cols, stripes, num_groups, group_width, permutations, perm_length, improvements, best_indices
):
    """Find for each group of `group_width` stripes the permutation that gains most, and its gain."""
    orders = permutations.reshape(-1, group_width * 4).tolist()
    best = _gains(matrix, rows, cols, stripes, group_width, orders).max(0)
    improvements.reshape(-1)[:num_groups] = best.values.numpy()
    best_indices.reshape(-1)[:num_groups] = best.indices.numpy()
    return 0


def check_permutations(matrix, rows, cols, stripe_groups, group_width, num_groups, *rest):  # type: ignore[no-untyped-def]
    """Call `build_permute_map`, with the sizes of groups in another order; permutation 0 is the identity."""
    return build_permute_map(matrix, rows, cols, stripe_groups, num_groups, group_width, *rest)


def build_swap_map(matrix, rows, cols, stripe_pairs, output):  # type: ignore[no-untyped-def]
    """Write for each pair of stripes the gain of swapping column i of the first and j of the second, at 4 i + j."""
    swaps = [(i, j) for i in range(4) for j in range(4, 8)]
    orders = [[{i: j, j: i}.get(place, place) for place in range(8)] for i, j in swaps]
    gains = _gains(matrix, rows, cols, stripe_pairs, 2, orders).t()
    output.reshape(-1)[: gains.numel()] = gains.flatten().numpy()
    return 0
