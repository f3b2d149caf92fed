"""Masks against brute force over all patterns."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from apex.contrib.sparsity import create_mask, sparse_masklib


def best_1d(row: list[float], n: int) -> list[float]:
    """Return the first of all choices of n with the largest sum."""
    sums = [sum(row[i] for i in chosen) for chosen in itertools.combinations(range(len(row)), n)]
    chosen = list(itertools.combinations(range(len(row)), n))[sums.index(max(sums))]
    return [1.0 if i in chosen else 0.0 for i in range(len(row))]


@pytest.mark.parametrize(("m", "n"), [(4, 2), (4, 1), (8, 2), (8, 6), (3, 2), (5, 5)])
@pytest.mark.parametrize("columns", [24, 30])
def test_one_dimension(m: int, n: int, columns: int) -> None:
    torch.manual_seed(0)
    matrix = torch.randint(-3, 4, (5, columns)).float()  # many ties
    mask = sparse_masklib.mn_1d_best(matrix, m, n)
    padded = torch.nn.functional.pad(matrix.abs(), (0, -columns % m))
    expected = torch.tensor([best_1d(row, n) for row in padded.view(-1, m).tolist()]).view(padded.shape)
    assert torch.equal(mask, expected[:, :columns])


def test_patterns() -> None:
    assert sparse_masklib.compute_valid_1d_patterns(4, 2).shape == (6, 4)
    blocks = sparse_masklib.compute_valid_2d_patterns(4, 2)
    assert blocks.shape == (90, 4, 4)
    assert (blocks.sum(1) == 2).all()
    assert (blocks.sum(2) == 2).all()
    assert len({tuple(block.flatten().tolist()) for block in blocks}) == 90
    assert sparse_masklib.compute_valid_2d_patterns(3, 1).shape == (6, 3, 3)  # after other numbers


def numbers(rows: int, columns: int, ties: bool) -> torch.Tensor:
    """Return random numbers, or small integers with many ties and exact sums."""
    torch.manual_seed(0)
    return torch.randint(-2, 3, (rows, columns)).float() if ties else torch.randn(rows, columns)


@pytest.mark.parametrize("ties", [False, True])
def test_two_dimensions_best(ties: bool) -> None:
    """The first of several patterns with the largest sum is taken on every device."""
    matrix = numbers(10, 13, ties)
    mask = sparse_masklib.mn_2d_best(matrix, 4, 2)
    blocks = sparse_masklib.compute_valid_2d_patterns(4, 2)
    padded = torch.nn.functional.pad(matrix.abs(), (0, 3, 0, 2))
    for i, j in itertools.product(range(0, 12, 4), range(0, 16, 4)):
        best = max(range(90), key=lambda k: float((blocks[k] * padded[i : i + 4, j : j + 4]).sum()))
        assert torch.equal(mask[i : i + 4, j : j + 4], blocks[best][: 10 - i, : 13 - j])


@pytest.mark.parametrize("ties", [False, True])
def test_two_dimensions_greedy(ties: bool) -> None:
    """The first of several equal weights in a block is considered first."""
    matrix = numbers(9, 14, ties)
    mask = sparse_masklib.mn_2d_greedy(matrix, 4, 2)
    assert (mask[8:] == 1).all()
    assert (mask[:, 12:] == 1).all()
    for i, j in itertools.product((0, 4), (0, 4, 8)):
        block, expected = matrix[i : i + 4, j : j + 4].abs(), torch.zeros(4, 4)
        for place in block.flatten().argsort(descending=True, stable=True).tolist():
            row, column = divmod(place, 4)
            if expected[row].sum() < 2 and expected[:, column].sum() < 2:
                expected[row, column] = 1
        assert torch.equal(mask[i : i + 4, j : j + 4], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(16,), (8, 16), (8, 16, 3), (8, 16, 3, 2), (8, 16, 2, 3, 2)])
def test_layouts(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(shape).to(dtype)
    mask = create_mask(tensor)
    assert (mask.shape, mask.dtype, mask.is_contiguous()) == (tensor.shape, dtype, True)
    matrix = tensor.reshape(1, -1) if tensor.dim() == 1 else tensor.movedim(1, -1).reshape(-1, 16)
    rows = mask.reshape(1, -1) if tensor.dim() == 1 else mask.movedim(1, -1).reshape(-1, 16)
    assert torch.equal(rows.float(), sparse_masklib.mn_1d_best(matrix.float(), 4, 2))
    assert sparse_masklib.fill(mask) == 0.5


def test_other_numbers_by_name() -> None:
    tensor = torch.randn(8, 16)
    assert torch.equal(create_mask(tensor, "m8n2_1d"), sparse_masklib.mn_1d_best(tensor, 8, 2))
    assert torch.equal(create_mask(tensor, "m4n2_2d_best"), sparse_masklib.mn_2d_best(tensor, 4, 2))
    assert torch.equal(create_mask(tensor, "m8n4_2d_greedy"), sparse_masklib.mn_2d_greedy(tensor, 8, 4))
    assert torch.equal(create_mask(tensor * float("nan")), create_mask(torch.ones(8, 16)))


def test_errors() -> None:
    for pattern in ("m4n2_3d", "unstructured", "m4n5_1d", "mxn2_1d"):
        with pytest.raises(ValueError, match=r"pattern|kept"):
            create_mask(torch.ones(4, 4), pattern)
    with pytest.raises(TypeError, match=r"floating-point, got torch\.int64"):
        create_mask(torch.ones(4, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="one to five dimensions"):
        create_mask(torch.ones(1, 1, 1, 1, 4, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ["m4n2_1d", "m4n2_2d_best", "m4n2_2d_greedy", "m8n2_1d"])
def test_masks_are_the_same_on_a_gpu(pattern: str) -> None:
    tensor = torch.randint(-4, 5, (64, 64, 3, 3)).half()
    assert torch.equal(create_mask(tensor.cuda(), pattern).cpu(), create_mask(tensor, pattern))


def test_scores_of_few_blocks_are_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    expected = sparse_masklib.mn_2d_best(matrix, 4, 2)
    patterns, sizes, zeros = len(sparse_masklib.compute_valid_2d_patterns(4, 2)), [], torch.zeros

    def note(*shape: Any, **options: Any) -> torch.Tensor:
        sizes.append(shape)
        return zeros(*shape, **options)

    monkeypatch.setattr(sparse_masklib, "_CHUNK", 10 * patterns)
    monkeypatch.setattr(torch, "zeros", note)
    assert torch.equal(sparse_masklib.mn_2d_best(matrix, 4, 2), expected)
    assert [rows for rows, _ in sizes] == [10, 10, 10, 10, 10, 10, 4]
