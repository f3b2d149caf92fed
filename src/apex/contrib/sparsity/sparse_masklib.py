"""Masks of structured sparsity: which weights of a tensor are kept, for any N of M, dtype and device.

A pattern is a function `f(matrix, density) -> mask` of this module, named by `create_mask`; it prunes along the second
dimension. Of equally good choices the one with the lowest number is taken, so that masks are the same on every device.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable

import torch
from torch import Tensor

# Elements of the scores of all patterns that are computed at once: 64 MB.
_CHUNK = 1 << 24


def fill(x: Tensor) -> float:
    """The fraction of elements that are not zero."""
    return float(x.count_nonzero()) / x.numel()


def reshape_1d(matrix: Tensor, m: int) -> tuple[Tensor, torch.Size]:
    """The matrix in rows of `m`, and its shape; columns of zeros are added where `m` does not divide their number."""
    matrix = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % m))
    return matrix.reshape(-1, m), matrix.shape


@functools.cache
def _patterns_1d(m: int, n: int) -> tuple[tuple[float, ...], ...]:
    if not 0 < n <= m:
        raise ValueError(f"n of m weights are kept, 0 < n <= m; got n={n}, m={m}")
    kept = itertools.combinations(range(m), n)
    return tuple(tuple(float(place in chosen) for place in range(m)) for chosen in kept)


@functools.cache
def _patterns_2d(m: int, n: int) -> tuple[tuple[float, ...], ...]:
    found: list[tuple[float, ...]] = [()]
    for _ in range(m):
        longer = [(*rows, *row) for rows in found for row in _patterns_1d(m, n)]
        found = [rows for rows in longer if all(sum(rows[column::m]) <= n for column in range(m))]
    return tuple(found)


def compute_valid_1d_patterns(m: int, n: int) -> Tensor:
    """All vectors of `m` numbers of which `n` are 1 and the others 0: [patterns, m]."""
    return torch.tensor(_patterns_1d(m, n), dtype=torch.float32, device=torch.get_default_device())


def compute_valid_2d_patterns(m: int, n: int) -> Tensor:
    """All m x m matrices of 0 and 1 with `n` ones in every row and column: [patterns, m, m]."""
    device = torch.get_default_device()
    return torch.tensor(_patterns_2d(m, n), dtype=torch.float32, device=device).view(-1, m, m)


def _best_patterns(groups: Tensor, table: tuple[tuple[float, ...], ...]) -> Tensor:
    """For each row of `groups`, the pattern that keeps the largest sum of absolute values; the first of equal ones."""
    patterns, chosen = groups.new_tensor(table), [torch.empty(0, dtype=torch.int64, device=groups.device)]
    numbers = torch.arange(len(table), dtype=torch.int64, device=groups.device)
    for part in groups.abs().split(max(1, _CHUNK // len(table))):
        # Summed place by place: a matrix product would round differently from device to device, and ties with it.
        scores = torch.zeros(len(part), len(table), dtype=part.dtype, device=part.device)
        for place in range(part.shape[1]):
            scores += part[:, place, None] * patterns[None, :, place]
        is_best = (scores == scores.amax(1, keepdim=True)) | scores.isnan()
        chosen.append(torch.where(is_best, numbers, len(table)).amin(1))
    return patterns[torch.cat(chosen)]


def mn_1d_best(matrix: Tensor, m: int, n: int) -> Tensor:
    """A mask that keeps, of every `m` neighbours in a row, the `n` with the largest absolute values."""
    groups, shape = reshape_1d(matrix.float(), m)
    return _best_patterns(groups, _patterns_1d(m, n)).view(shape)[:, : matrix.shape[1]]


def _blocks(matrix: Tensor, m: int) -> Tensor:
    """m x m blocks of the matrix, whose sides `m` divides: [blocks, m * m]."""
    rows, columns = matrix.shape
    return matrix.reshape(rows // m, m, columns // m, m).transpose(1, 2).reshape(-1, m * m)


def _from_blocks(blocks: Tensor, shape: torch.Size, m: int) -> Tensor:
    return blocks.view(shape[0] // m, shape[1] // m, m, m).transpose(1, 2).reshape(shape)


def mn_2d_best(matrix: Tensor, m: int, n: int) -> Tensor:
    """A mask of m x m blocks with `n` weights in every row and column: of all such, what keeps the largest sum.

    The matrix is filled up with zeros to whole blocks. The transposed weight is sparse in the same way, which the
    backward pass can use.
    """
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix.float(), (0, -columns % m, 0, -rows % m))
    return _from_blocks(_best_patterns(_blocks(padded, m), _patterns_2d(m, n)), padded.shape, m)[:rows, :columns]


def mn_2d_greedy(matrix: Tensor, m: int, n: int) -> Tensor:
    """A mask of m x m blocks made weight by weight, the largest first: kept if its row and column have less than `n`.

    Rows and columns beyond the last whole block are kept.
    """
    rows, columns = (size // m * m for size in matrix.shape)
    mask = torch.ones_like(matrix, dtype=torch.float32)
    blocks = _blocks(matrix[:rows, :columns].float().abs(), m)
    every = torch.arange(len(blocks), dtype=torch.int64, device=blocks.device)
    kept = torch.zeros_like(blocks).view(-1, m, m)
    for place in blocks.sort(dim=1, descending=True, stable=True).indices.unbind(1):
        row, column = place // m, place % m
        fits = (kept[every, row].sum(1) < n) & (kept[every, :, column].sum(1) < n)
        kept[every, row, column] = fits.float()
    mask[:rows, :columns] = _from_blocks(kept, mask[:rows, :columns].shape, m)
    return mask


def m4n2_1d(mat: Tensor, density: float) -> Tensor:
    """2 of 4 neighbours in a row."""
    return mn_1d_best(mat, 4, 2)


def m4n2_2d_best(mat: Tensor, density: float) -> Tensor:
    """2 of 4 in rows and columns, the best of 90 patterns for each block."""
    return mn_2d_best(mat, 4, 2)


def m4n2_2d_greedy(mat: Tensor, density: float) -> Tensor:
    """2 of 4 in rows and columns, chosen weight by weight."""
    return mn_2d_greedy(mat, 4, 2)


def as_matrix(tensor: Tensor) -> Tensor:
    """A weight as a matrix whose columns are its input channels, the second dimension; a vector is one row."""
    return tensor.reshape(1, -1) if tensor.dim() < 2 else tensor.movedim(1, -1).reshape(-1, tensor.shape[1])


def find_pattern(pattern: str) -> Callable[[Tensor, float], Tensor]:
    """The function of a pattern: one of this module, or `m<M>n<N>_1d`, `_2d_best`, `_2d_greedy` for other numbers."""
    if callable(globals().get(pattern)):
        return globals()[pattern]
    numbers = re.fullmatch(r"m(\d+)n(\d+)_(1d|2d)_?(best|greedy)?", pattern)
    maker = globals().get(f"mn_{numbers[3]}_{numbers[4] or 'best'}") if numbers else None
    if numbers is None or maker is None:
        raise ValueError(
            f"pattern {pattern!r} is not known: give m4n2_1d, m4n2_2d_best, m4n2_2d_greedy, or other numbers like them "
            "(m8n2_1d keeps 2 of 8)"
        )
    m, n = int(numbers[1]), int(numbers[2])
    _patterns_1d(m, n)  # refuses numbers that do not fit
    return lambda matrix, density: maker(matrix, m, n)


@torch.no_grad()
def create_mask(tensor: Tensor, pattern: str = "m4n2_1d", density: float = 0.5) -> Tensor:
    """A mask of ones and zeros, shaped and typed like the tensor: a weight of one to five dimensions.

    Input channels, the second dimension, are pruned; a vector is one row. `density` is passed on to the pattern.
    """
    if not tensor.is_floating_point():
        raise TypeError(f"tensor must be floating-point, got {tensor.dtype}")
    if not 1 <= tensor.dim() <= 5:
        raise ValueError(f"tensor must have one to five dimensions, got {tensor.dim()}: {list(tensor.shape)}")
    mask = find_pattern(pattern)(as_matrix(tensor.detach().float()), density).to(tensor.dtype)
    shape = tensor.shape
    return mask.view(shape) if len(shape) < 2 else mask.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1).contiguous()
