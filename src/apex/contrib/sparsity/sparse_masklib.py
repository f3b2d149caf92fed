"""Masks of structured sparsity for any N of M weights, dtype and device.

A pattern is a function `f(matrix, density) -> mask` of this module, named by `create_mask`; it prunes along the second
dimension. Of equally good choices the first is taken, so that masks are the same on every device.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...ops._host import HOST

# Elements of the score matrix that are computed at once: 64 MB.
_CHUNK = 1 << 24


def fill(x: Tensor) -> float:
    """Return the fraction of elements that are not zero."""
    return float(x.count_nonzero()) / x.numel()


def reshape_1d(matrix: Tensor, m: int) -> tuple[Tensor, torch.Size]:
    """Return the matrix in rows of `m`, and its shape after padding with columns of zeros to a multiple of `m`."""
    matrix = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % m))
    return matrix.reshape(-1, m), matrix.shape


@functools.cache
def _patterns(m: int, n: int, height: int) -> Tensor:
    """Return all 0-1 matrices with `n` ones in every row and at most `n` in every column: [patterns, height, m]."""
    if not 0 < n <= m:
        raise ValueError(f"n of m weights are kept, 0 < n <= m; got n={n}, m={m}")
    rows = [tuple(float(column in kept) for column in range(m)) for kept in itertools.combinations(range(m), n)]
    partial_patterns: list[tuple[float, ...]] = [()]
    for _ in range(height):
        longer = [(*above, *row) for above in partial_patterns for row in rows]
        partial_patterns = [pattern for pattern in longer if all(sum(pattern[column::m]) <= n for column in range(m))]
    return torch.tensor(partial_patterns, dtype=torch.float32, device=HOST).view(-1, height, m)


def compute_valid_1d_patterns(m: int, n: int) -> Tensor:
    """Return all vectors of `m` elements with `n` ones and zeros elsewhere: [patterns, m]."""
    return _patterns(m, n, 1)[:, 0].clone()


def compute_valid_2d_patterns(m: int, n: int) -> Tensor:
    """Return all m x m 0-1 matrices with `n` ones in every row and column: [patterns, m, m]."""
    return _patterns(m, n, m).clone()


def _blocks(matrix: Tensor, m: int) -> Tensor:
    """Return the m x m blocks of a matrix whose sides are multiples of `m`: [rows / m, columns / m, m, m]."""
    return matrix.unflatten(1, (-1, m)).unflatten(0, (-1, m)).transpose(1, 2)


def mn_1d_best(matrix: Tensor, m: int, n: int) -> Tensor:
    """Return a mask that keeps, of every `m` neighbours in a row, the `n` with the largest absolute values."""
    groups, shape = reshape_1d(matrix.float().abs(), m)
    largest = groups.sort(dim=1, descending=True, stable=True).indices[:, :n]
    return torch.zeros_like(groups).scatter_(1, largest, 1.0).view(shape)[:, : matrix.shape[1]]


def mn_2d_best(matrix: Tensor, m: int, n: int) -> Tensor:
    """Return the mask with `n` weights in every row and column of each m x m block that keeps the largest sum.

    The matrix is padded with zeros to whole blocks. The transposed weight has the same sparsity, which the backward
    pass can use.
    """
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix.float().abs(), (0, -columns % m, 0, -rows % m))
    blocks, patterns = _blocks(padded, m), _patterns(m, n, m).flatten(1).to(matrix.device)
    numbers = torch.arange(len(patterns), dtype=torch.int64, device=matrix.device)
    chosen = [numbers[:0]]
    for part in blocks.reshape(-1, m * m).split(max(1, _CHUNK // len(patterns))):
        # Summed element by element: a matrix product rounds, and so breaks ties, differently on each device.
        scores = torch.zeros(len(part), len(patterns), dtype=torch.float32, device=matrix.device)
        for element in range(m * m):
            scores += part[:, element, None] * patterns[None, :, element]
        is_best = (scores == scores.amax(1, keepdim=True)) | scores.isnan()
        chosen.append(torch.where(is_best, numbers, len(patterns)).amin(1))
    return patterns[torch.cat(chosen)].view(blocks.shape).transpose(1, 2).reshape(padded.shape)[:rows, :columns]


def mn_2d_greedy(matrix: Tensor, m: int, n: int) -> Tensor:
    """Return a mask of m x m blocks built greedily from the largest weight down.

    A weight is kept if its row and its column have fewer than `n`. Rows and columns beyond the last whole block are
    kept.
    """
    rows, columns = (size // m * m for size in matrix.shape)
    blocks = _blocks(matrix[:rows, :columns].float().abs(), m)
    falling = blocks.reshape(-1, m * m).sort(dim=1, descending=True, stable=True).indices
    every = torch.arange(len(falling), dtype=torch.int64, device=matrix.device)
    kept = torch.zeros(len(falling), m, m, dtype=torch.float32, device=matrix.device)
    for element in falling.unbind(1):
        row, column = element // m, element % m
        fits = (kept[every, row].sum(1) < n) & (kept[every, :, column].sum(1) < n)
        kept[every, row, column] = fits.float()
    mask = torch.ones_like(matrix, dtype=torch.float32)
    mask[:rows, :columns] = kept.view(blocks.shape).transpose(1, 2).reshape(rows, columns)
    return mask


def _pattern(function: Callable[[Tensor, int, int], Tensor], m: int, n: int) -> Callable[[Tensor, float], Tensor]:
    _patterns(m, n, 1)  # raises an error for invalid m and n

    def pattern(mat: Tensor, density: float) -> Tensor:
        return function(mat, m, n)

    return pattern


m4n2_1d = _pattern(mn_1d_best, 4, 2)
m4n2_2d_best = _pattern(mn_2d_best, 4, 2)
m4n2_2d_greedy = _pattern(mn_2d_greedy, 4, 2)


def as_matrix(tensor: Tensor) -> Tensor:
    """Return a weight as a matrix whose columns are its input channels (dimension 1); a vector becomes one row."""
    return tensor.reshape(1, -1) if tensor.dim() < 2 else tensor.movedim(1, -1).reshape(-1, tensor.shape[1])


def find_pattern(pattern: str) -> Callable[[Tensor, float], Tensor]:
    """Return a pattern's function: one of this module, or `m<M>n<N>_1d`, `_2d_best`, `_2d_greedy` for other M and N."""
    if pattern not in _NO_PATTERNS and callable(globals().get(pattern)):  # also functions that users add
        return globals()[pattern]
    numbers = re.fullmatch(r"m(\d+)n(\d+)_(1d|2d_best|2d_greedy)", pattern)
    if numbers is None:
        raise ValueError(
            f"pattern {pattern!r} is not known: give m4n2_1d, m4n2_2d_best, m4n2_2d_greedy, or other numbers like them "
            "(m8n2_1d keeps 2 of 8)"
        )
    functions = {"1d": mn_1d_best, "2d_best": mn_2d_best, "2d_greedy": mn_2d_greedy}
    return _pattern(functions[numbers[3]], int(numbers[1]), int(numbers[2]))


@torch.no_grad()
def create_mask(tensor: Tensor, pattern: str = "m4n2_1d", density: float = 0.5) -> Tensor:
    """Return a mask of ones and zeros with the shape and dtype of a weight of one to five dimensions.

    Input channels (dimension 1) are pruned; a vector is treated as one row. `density` is passed on to the pattern.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor must be a torch.Tensor, got {type(tensor).__name__}")
    if not tensor.is_floating_point():
        raise TypeError(f"tensor must be floating-point, got {tensor.dtype}")
    if not 1 <= tensor.dim() <= 5:
        raise ValueError(f"tensor must have one to five dimensions, got {tensor.dim()}: {list(tensor.shape)}")
    mask = find_pattern(pattern)(as_matrix(tensor.detach().float()), density).to(tensor.dtype)
    shape = tensor.shape
    return mask.view(shape) if len(shape) < 2 else mask.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1).contiguous()


class WandaMask:
    """A `mask_calculator` for ASP that ranks weights by absolute value times the norm of their input channel.

    This is Wanda, https://arxiv.org/abs/2306.11695. The norms are taken from the inputs that linear layers and
    convolutions get inside the `with` block:

        with WandaMask(model) as calculator:
            model(batch)
        ASP.init_model_for_pruning(model, calculator)

    Other parameters, and layers that got no input, are pruned by absolute value.
    """

    def __init__(self, model: nn.Module, pattern: str = "m4n2_1d") -> None:
        self.pattern = pattern
        self._layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)]
        self._squares: dict[Tensor, Tensor] = {}

    def __enter__(self) -> WandaMask:
        self._hooks = [layer.register_forward_pre_hook(self._see, with_kwargs=True) for layer in self._layers]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _see(self, layer: Any, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        """Add up the squares of a layer's inputs, shaped to broadcast to its weight."""
        weight, groups = layer.weight, getattr(layer, "groups", 1)
        input = inputs[0] if inputs else named["input"]
        squares = input.detach().float().square().movedim(1 - weight.dim(), 0).flatten(1).sum(1).view(groups, -1)
        if groups > 1:
            squares = squares.repeat_interleave(len(weight) // groups, 0)
        squares = squares.view(*squares.shape, *(1,) * (weight.dim() - 2))
        self._squares[weight] = self._squares.get(weight, 0) + squares

    def __call__(self, param: Tensor) -> Tensor:
        """Return the mask of a parameter."""
        squares = next((squares for key, squares in self._squares.items() if key.data_ptr() == param.data_ptr()), None)
        return create_mask(param if squares is None else param.float() * squares.sqrt(), self.pattern)

    def tied_tensors(self, param: Tensor) -> list[Tensor]:
        """Return the tensors that ASP permutes together with the channels of a parameter."""
        return [self._squares[param]] if param in self._squares else []


# Names of this module that `find_pattern` does not find: imports and helpers.
_NO_PATTERNS = frozenset(globals()) - {"m4n2_1d", "m4n2_2d_best", "m4n2_2d_greedy"}
