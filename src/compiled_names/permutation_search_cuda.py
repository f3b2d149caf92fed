"""The compiled functions of the permutation search, over arrays of numpy: results go to the arrays given.

A group is some stripes (4 columns) of the matrix; a permutation orders the columns of a group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from apex.contrib.sparsity.permutation_search_kernels.permutation_utilities import (
    sum_after_2_to_4 as _kept,
)
from apex.ops.permutation import reference as _reference


def _columns(matrix: Any, rows: int, cols: int) -> Tensor:
    return torch.from_numpy(matrix.reshape(rows, cols)).abs().float().t().contiguous()


def _windows(stripes: Any, width: int) -> Tensor:
    """The columns of each group of stripes."""
    first = torch.from_numpy(stripes.reshape(-1, width).astype("int64")) * 4
    return (first[:, :, None] + torch.arange(4, dtype=torch.int64, device=first.device)).flatten(1)


def sum_after_2_to_4(
    matrix: Any, rows: int, cols: int, start_col: int, end_col: int, blocks: int, threads: int, output: Any
) -> int:
    """output[0] is what 2:4 pruning keeps of the columns from `start_col` to `end_col`."""
    output.reshape(-1)[0] = _kept(matrix.reshape(rows, cols)[:, start_col:end_col])
    return 0


def build_permute_map(
    matrix: Any,
    rows: int,
    cols: int,
    stripes: Any,
    num_groups: int,
    group_width: int,
    permutations: Any,
    perm_length: int,
    improvements: Any,
    best_indices: Any,
) -> int:
    """For each group of `group_width` stripes the permutation that gains most, and what it gains."""
    windows = _windows(stripes, group_width)
    orders = torch.from_numpy(permutations.reshape(-1, group_width * 4).astype("int64"))
    identity = torch.arange(group_width * 4, dtype=torch.int64, device=orders.device)[None]
    kept = _reference.kept_by_orders(_columns(matrix, rows, cols), windows, torch.cat((identity, orders)))
    gains = kept[1:] - kept[0]
    improvements.reshape(-1)[:num_groups] = gains.amax(0).numpy()
    best_indices.reshape(-1)[:num_groups] = (gains == gains.amax(0)).int().argmax(0).numpy()
    return 0


def check_permutations(
    matrix: Any,
    rows: int,
    cols: int,
    stripe_groups: Any,
    group_width: int,
    num_groups: int,
    permutations: Any,
    num_permutations: int,
    improvement: Any,
    permutation: Any,
) -> int:
    """The same with the sizes of groups in another order; permutation 0 leaves the columns as they are."""
    return build_permute_map(
        matrix,
        rows,
        cols,
        stripe_groups,
        num_groups,
        group_width,
        permutations,
        num_permutations,
        improvement,
        permutation,
    )


def build_swap_map(matrix: Any, rows: int, cols: int, stripe_pairs: Any, output: Any) -> int:
    """For each pair of stripes what is gained by swapping column i of the first and j of the second, at 4 i + j."""
    orders = [list(range(8))]
    for i in range(4):
        for j in range(4, 8):
            orders.append(list(range(8)))
            orders[-1][i], orders[-1][j] = j, i
    columns, windows = _columns(matrix, rows, cols), _windows(stripe_pairs, 2)
    kept = _reference.kept_by_orders(columns, windows, torch.tensor(orders, dtype=torch.int64, device=columns.device))
    gains = (kept[1:] - kept[0]).t()
    output.reshape(-1)[: gains.numel()] = gains.flatten().numpy()
    return 0
