"""Masks of structured sparsity: which weights of a tensor are kept, for any N of M, dtype and device.

A pattern is a function `f(matrix, density) -> mask` of this module, named by `create_mask`; it prunes along the second
dimension. Of equally good choices the one with the lowest number is taken, so that masks are the same on every device.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

# Elements of the scores of all patterns that are computed at once: 64 MB.
_CHUNK = 1 << 24


def fill(x: Tensor) -> float:
    """The fraction of elements that are not zero."""
    return float(x.count_nonzero()) / x.numel()


def reshape_1d(matrix: Tensor, m: int) -> tuple[Tensor, torch.Size]:
    """The matrix in rows of `m`, and its shape; columns of zeros are added where `m` does not divide their number."""
    columns = matrix.shape[1]
    if columns % m:
        matrix = torch.nn.functional.pad(matrix, (0, m - columns % m))
    return matrix.reshape(-1, m), matrix.shape


@functools.cache
def _patterns_1d(m: int, n: int) -> tuple[tuple[float, ...], ...]:
    if not 0 < n <= m:
        raise ValueError(f"n of m weights are kept, 0 < n <= m; got n={n}, m={m}")
    kept = itertools.combinations(range(m), n)
    return tuple(tuple(1.0 if place in chosen else 0.0 for place in range(m)) for chosen in kept)


@functools.cache
def _patterns_2d(m: int, n: int) -> tuple[tuple[float, ...], ...]:
    found: list[tuple[float, ...]] = []

    def extend(rows: tuple[tuple[float, ...], ...], left: tuple[float, ...]) -> None:
        if len(rows) == m:
            found.append(tuple(itertools.chain.from_iterable(rows)))
            return
        for row in _patterns_1d(m, n):
            after = tuple(count - value for count, value in zip(left, row, strict=True))
            if min(after) >= 0:
                extend((*rows, row), after)

    extend((), (float(n),) * m)
    return tuple(found)


def compute_valid_1d_patterns(m: int, n: int) -> Tensor:
    """All vectors of `m` numbers of which `n` are 1 and the others 0: [patterns, m]."""
    return torch.tensor(_patterns_1d(m, n), dtype=torch.float32, device=torch.get_default_device())


def compute_valid_2d_patterns(m: int, n: int) -> Tensor:
    """All m x m matrices of 0 and 1 with `n` ones in every row and column: [patterns, m, m]."""
    patterns = torch.tensor(_patterns_2d(m, n), dtype=torch.float32, device=torch.get_default_device())
    return patterns.view(-1, m, m)


def _best_patterns(groups: Tensor, table: tuple[tuple[float, ...], ...]) -> Tensor:
    """For each row of `groups`, the pattern that keeps the largest sum of absolute values; the first of equal ones."""
    patterns = groups.new_tensor(table)
    chosen = []
    for part in groups.abs().split(max(1, _CHUNK // len(patterns))):
        # Summed place by place: a matrix product would round differently from device to device, and ties with it.
        scores = sum(part[:, place, None] * patterns[None, :, place] for place in range(part.shape[1]))
        is_best = scores == scores.amax(1, keepdim=True)  # type: ignore[union-attr]
        is_best[scores.isnan()] = True  # type: ignore[union-attr]
        numbers = torch.arange(len(patterns), dtype=torch.int32, device=groups.device)
        chosen.append(torch.where(is_best, numbers, len(patterns)).amin(1).long())
    return patterns[torch.cat(chosen)]


def mn_1d_best(matrix: Tensor, m: int, n: int) -> Tensor:
    """A mask that keeps, of every `m` neighbours in a row, the `n` with the largest absolute values."""
    groups, shape = reshape_1d(matrix.float(), m)
    if not groups.numel():
        return torch.ones_like(matrix)
    mask = _best_patterns(groups, _patterns_1d(m, n)).view(shape)
    return mask[:, : matrix.shape[1]]


def _blocks(matrix: Tensor, m: int) -> Tensor:
    """m x m blocks of the matrix, whose sides `m` divides: [blocks, m, m]."""
    rows, columns = matrix.shape
    return matrix.reshape(rows // m, m, columns // m, m).transpose(1, 2).reshape(-1, m, m)


def _from_blocks(blocks: Tensor, rows: int, columns: int, m: int) -> Tensor:
    return blocks.view(rows // m, columns // m, m, m).transpose(1, 2).reshape(rows, columns)


def mn_2d_best(matrix: Tensor, m: int, n: int) -> Tensor:
    """A mask of m x m blocks with `n` weights in every row and column: of all such, what keeps the largest sum.

    The matrix is filled up with zeros to whole blocks. The transposed weight is sparse in the same way, which the
    backward pass can use.
    """
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix.float(), (0, -columns % m, 0, -rows % m))
    if not padded.numel():
        return torch.ones_like(matrix)
    best = _best_patterns(_blocks(padded, m).flatten(1), _patterns_2d(m, n))
    return _from_blocks(best, padded.shape[0], padded.shape[1], m)[:rows, :columns]


def mn_2d_greedy(matrix: Tensor, m: int, n: int) -> Tensor:
    """A mask of m x m blocks made weight by weight, the largest first: kept if its row and column have less than `n`.

    Rows and columns beyond the last whole block are kept.
    """
    rows, columns = (size // m * m for size in matrix.shape)
    mask = torch.ones_like(matrix, dtype=torch.float32)
    if not rows * columns:
        return mask
    blocks = _blocks(matrix[:rows, :columns].float().abs(), m).flatten(1)
    order = blocks.sort(dim=1, descending=True, stable=True).indices
    every = torch.arange(len(blocks), dtype=torch.int64, device=blocks.device)
    kept = torch.zeros_like(blocks)
    in_row, in_column = (torch.zeros(len(blocks), m, dtype=torch.float32, device=blocks.device) for _ in range(2))
    for place in order.unbind(1):
        row, column = place // m, place % m
        fits = ((in_row[every, row] < n) & (in_column[every, column] < n)).float()
        kept[every, place] = fits
        in_row[every, row] += fits
        in_column[every, column] += fits
    mask[:rows, :columns] = _from_blocks(kept, rows, columns, m)
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
    """A weight as a matrix whose columns are its input channels, the second dimension: [elements / channels, channels].

    Weights of one dimension are one row.
    """
    if tensor.dim() < 2:
        return tensor.reshape(1, -1)
    return tensor.movedim(1, -1).reshape(-1, tensor.shape[1])


def from_matrix(matrix: Tensor, shape: torch.Size) -> Tensor:
    """What `as_matrix` made a matrix of."""
    if len(shape) < 2:
        return matrix.reshape(shape)
    return matrix.reshape(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def find_pattern(pattern: str):  # type: ignore[no-untyped-def]
    """The function of a pattern: one of this module, or `m<M>n<N>_1d`, `_2d_best`, `_2d_greedy` for other numbers."""
    function = globals().get(pattern)
    if callable(function):
        return function
    sizes, _, kind = pattern.partition("_")
    numbers = sizes.removeprefix("m").split("n")
    makers = {"1d": mn_1d_best, "2d_best": mn_2d_best, "2d_greedy": mn_2d_greedy}
    if sizes.startswith("m") and len(numbers) == 2 and all(map(str.isdecimal, numbers)) and kind in makers:
        m, n = map(int, numbers)
        _patterns_1d(m, n)  # refuses numbers that do not fit
        return lambda matrix, density: makers[kind](matrix, m, n)
    raise ValueError(
        f"pattern {pattern!r} is not known: give m4n2_1d, m4n2_2d_best, m4n2_2d_greedy, or other numbers like them "
        "(m8n2_1d keeps 2 of 8)"
    )


@torch.no_grad()
def create_mask(tensor: Tensor, pattern: str = "m4n2_1d", density: float = 0.5) -> Tensor:
    """A mask of ones and zeros, shaped and typed like the tensor: a weight of one to five dimensions.

    Input channels, the second dimension, are pruned; a vector is one row. `density` is passed on to the pattern.
    """
    if not tensor.is_floating_point():
        raise TypeError(f"tensor must be floating-point, got {tensor.dtype}")
    if not 1 <= tensor.dim() <= 5:
        raise ValueError(f"tensor must have one to five dimensions, got {tensor.dim()}: {list(tensor.shape)}")
    mask = find_pattern(pattern)(as_matrix(tensor.detach().float()), density)
    return from_matrix(mask, tensor.shape).to(tensor.dtype).contiguous()
