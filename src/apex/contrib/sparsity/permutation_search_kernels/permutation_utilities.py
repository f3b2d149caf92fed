"""Magnitudes that pruning keeps. Matrices are numpy arrays or tensors; results have the type of the argument."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....ops.permutation import kept_magnitude
from ..sparse_masklib import mn_1d_best


def as_tensor(matrix: Any) -> Tensor:
    """Return a matrix as a tensor that shares its memory."""
    tensor = matrix if isinstance(matrix, Tensor) else torch.from_numpy(matrix)
    if tensor.dim() != 2:
        raise ValueError(f"a matrix is expected, got {list(tensor.shape)}")
    return tensor.detach()


def like(matrix: Any, result: Tensor) -> Any:
    """Return a result converted to the type of `matrix`, array or tensor."""
    return result if isinstance(matrix, Tensor) else result.numpy()


def sum_after_2_to_4(matrix: Any) -> float:
    """Return the sum of the absolute values that 2:4 pruning keeps."""
    tensor = as_tensor(matrix).abs().float()
    columns = torch.nn.functional.pad(tensor, (0, -tensor.shape[1] % 4)).t().contiguous()
    return float(kept_magnitude(columns).sum())


def apply_2_to_4(matrix: Any) -> Any:
    """Return the matrix with the two smallest of every four neighbours in a row set to zero."""
    tensor = as_tensor(matrix)
    return like(matrix, tensor * mn_1d_best(tensor, 4, 2).to(tensor.dtype))


def unstructured_prune(matrix: Any, sparsity: float) -> Any:
    """Return the matrix with the given share of its elements, the smallest in absolute value, set to zero."""
    if not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity must be between 0 and 1, got {sparsity}")
    tensor = as_tensor(matrix)
    pruned = tensor.clone().flatten()
    pruned[tensor.abs().flatten().argsort(stable=True)[: int(sparsity * tensor.numel())]] = 0
    return like(matrix, pruned.view_as(tensor))


def magnitude_after_pruning_rows(matrix: Any, rate: float = 0.5) -> float:
    """Return the sum of the absolute values kept if every row loses this share of them: a bound for 2:4 pruning."""
    values = as_tensor(matrix).abs().double().sort(1).values
    return float(values[:, int(rate * values.shape[1]) :].sum())


def efficacy(optimal_lost: float, base_lost: float, cur_lost: float) -> float:
    """Return the share of the possible savings that was reached: 0 at the base, 1 at the optimum."""
    return 1.0 if base_lost == optimal_lost else 1.0 - abs(cur_lost - optimal_lost) / abs(base_lost - optimal_lost)


def try_swap(matrix: Any, dst: int, src: int) -> float:
    """Return how much more magnitude 2:4 pruning keeps if the columns `dst` and `src` change places."""
    tensor = as_tensor(matrix)
    order = list(range(tensor.shape[1]))
    order[dst], order[src] = order[src], order[dst]
    return sum_after_2_to_4(tensor[:, order]) - sum_after_2_to_4(tensor)
