"""What pruning keeps of a matrix. Matrices are arrays of numpy or tensors; results are of the same kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....ops.permutation import kept_magnitude
from ..sparse_masklib import mn_1d_best


def as_tensor(matrix: Any) -> Tensor:
    """A matrix as a tensor, which shares its memory with it."""
    tensor = matrix if isinstance(matrix, Tensor) else torch.from_numpy(matrix)
    if tensor.dim() != 2:
        raise ValueError(f"a matrix is expected, got {list(tensor.shape)}")
    return tensor.detach()


def like(matrix: Any, result: Tensor) -> Any:
    """A result of the same kind as the matrix that was given."""
    return result if isinstance(matrix, Tensor) else result.numpy()


def sum_after_2_to_4(matrix: Any) -> float:
    """The sum of the absolute values that 2:4 pruning keeps."""
    tensor = as_tensor(matrix).abs().float()
    columns = torch.nn.functional.pad(tensor, (0, -tensor.shape[1] % 4)).t().contiguous()
    return float(kept_magnitude(columns).sum())


def apply_2_to_4(matrix: Any) -> Any:
    """The matrix with the two smallest of every four neighbours in a row set to zero."""
    tensor = as_tensor(matrix)
    return like(matrix, tensor * mn_1d_best(tensor, 4, 2).to(tensor.dtype))


def unstructured_prune(matrix: Any, sparsity: float) -> Any:
    """The matrix with this share of its elements, the smallest absolute values, set to zero."""
    if not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity must be between 0 and 1, got {sparsity}")
    tensor = as_tensor(matrix)
    pruned = tensor.clone().flatten()
    pruned[tensor.abs().flatten().argsort(stable=True)[: int(sparsity * tensor.numel())]] = 0
    return like(matrix, pruned.view_as(tensor))


def magnitude_after_pruning_rows(matrix: Any, rate: float = 0.5) -> float:
    """The sum of the absolute values that are kept if every row loses this share of them: a bound for 2:4 pruning."""
    values = as_tensor(matrix).abs().double().sort(1).values
    return float(values[:, int(rate * values.shape[1]) :].sum())


def efficacy(optimal_lost: float, base_lost: float, cur_lost: float) -> float:
    """How much of what could be saved is saved: 0 for the base, 1 for the optimum."""
    return 1.0 if base_lost == optimal_lost else 1.0 - abs(cur_lost - optimal_lost) / abs(base_lost - optimal_lost)


def try_swap(matrix: Any, dst: int, src: int) -> float:
    """What 2:4 pruning keeps more if the columns `dst` and `src` change places."""
    tensor = as_tensor(matrix)
    order = list(range(tensor.shape[1]))
    order[dst], order[src] = order[src], order[dst]
    return sum_after_2_to_4(tensor[:, order]) - sum_after_2_to_4(tensor)
