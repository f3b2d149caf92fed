"""Examples of float8 copies of matrices, with one scale for a matrix, for each row or for each block."""

from __future__ import annotations

import torch
from torch import Tensor

from .._examples import Example
from . import blocks, op, reference

_DTYPE = torch.float8_e4m3fn


def _widened(copy: Tensor, transposed: Tensor, inverse: Tensor, turned_inverse: Tensor) -> tuple[Tensor, ...]:
    """Return both float8 copies times their inverse scales, in float32, and the inverse scales."""
    return copy.float() * inverse, transposed.float() * turned_inverse, inverse, turned_inverse


def _example(name: str, by_row: bool) -> Example:
    def function(input: Tensor) -> tuple[Tensor, ...]:
        input, compiling = input.contiguous(), torch.compiler.is_compiling()
        largest = op.amax(input, by_row, compiling)
        return _widened(*op.cast_both(input, largest, by_row, _DTYPE, compiling))

    def by_torch(input: Tensor) -> tuple[Tensor, ...]:
        return _widened(*reference.cast_both(input, reference.amax(input, by_row), by_row, _DTYPE))

    return Example(
        name,
        function,
        lambda make, rows, columns: {"input": make.normal(rows, columns, grad=False)},
        torch=by_torch,
        sizes="rows x columns",
        small=[(48, 80), (70, 33), (1, 1)],
    )


def _block_example(name: str, square: bool) -> Example:
    def widened(copy: Tensor, transposed: Tensor, inverse: Tensor, turned_inverse: Tensor) -> tuple[Tensor, ...]:
        straight, turned = reference.widened_blocks(copy, inverse), reference.widened_blocks(transposed, turned_inverse)
        return straight, turned, inverse, turned_inverse

    def function(input: Tensor) -> tuple[Tensor, ...]:
        return widened(*blocks.cast_blocks(input.contiguous(), square, False, _DTYPE, torch.compiler.is_compiling()))

    return Example(
        name,
        function,
        lambda make, rows, columns: {"input": make.normal(rows, columns, grad=False)},
        torch=lambda input: widened(*reference.cast_blocks(input, square, False, _DTYPE)),
        sizes="rows x columns",
        small=[(128, 256), (384, 128)],
    )


EXAMPLES = [
    _example("float8", False),
    _example("float8_by_row", True),
    _block_example("float8_blocks", False),
    _block_example("float8_square_blocks", True),
]
