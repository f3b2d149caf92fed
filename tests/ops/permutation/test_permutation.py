"""The best splits of windows of columns, by kernels and by operators, against brute force."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from apex.ops import _library, permutation
from apex.ops.permutation import op, reference
from tests.support.harness import Route, routes


def kept(columns: Tensor) -> float:
    """The sum of the two largest of every four."""
    return float(columns.view(-1, 4, columns.shape[1]).sort(1).values[:, 2:].sum())


def problem(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    columns = torch.rand(24, rows, generator=generator)
    windows = torch.stack([torch.randperm(24, generator=generator)[:8] for _ in range(3)])
    return columns, windows


def test_splits() -> None:
    splits = reference.window_splits()
    assert splits[0].tolist() == list(range(8))
    halves = {frozenset(map(frozenset, split.view(2, 4).tolist())) for split in splits}
    assert len(splits) == len(halves) == 35


def test_reference_is_the_definition() -> None:
    columns, windows = problem(7)
    gains, best = reference.best_splits(columns.double(), windows)
    splits = reference.window_splits()
    for window, gain, number in zip(windows, gains, best, strict=True):
        totals = [kept(columns.double()[window[split]]) for split in splits]
        assert float(gain) == pytest.approx(max(totals) - totals[0])
        assert totals.index(max(totals)) == int(number)


def test_the_first_of_equal_splits_is_taken() -> None:
    gains, best = reference.best_splits(torch.ones(8, 5), torch.arange(8)[None])
    assert (gains.tolist(), best.tolist()) == ([0.0], [0])


def test_kept_magnitude() -> None:
    columns, _ = problem(9)
    assert float(permutation.kept_magnitude(columns).sum()) == pytest.approx(kept(columns), rel=1e-6)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("rows", [1, 33, 300])
def test_every_implementation(route: Route, rows: int) -> None:
    columns, windows = problem(rows)
    expected, best = reference.best_splits(columns.double(), windows)
    with _library.implementation(route.implementation):
        found = [op.best_splits(columns.to(route.device), windows.to(route.device)) for _ in range(2)]
    torch.testing.assert_close(found[0][0].double().cpu(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[0][1].cpu(), best)
    assert torch.equal(found[0][0], found[1][0])


@pytest.mark.gpu
def test_search_finds_no_less_on_a_gpu() -> None:
    from apex.contrib.sparsity.permutation_search_kernels import (
        accelerated_search_for_good_permutation,
        sum_after_2_to_4,
    )

    matrix = torch.rand(300, 96, generator=torch.Generator().manual_seed(0))
    orders = [accelerated_search_for_good_permutation(matrix.to(device)) for device in ("cpu", "cuda", "cuda")]
    assert orders[1] == orders[2]
    here, there = (sum_after_2_to_4(matrix[:, order]) for order in orders[:2])
    # Sums are rounded differently, so orders differ; and a CPU that is busy may run out of time.
    assert there >= here * (1 - 1e-3)


def test_errors() -> None:
    columns, windows = problem(5)
    with pytest.raises(ValueError, match="float32 matrix"):
        op.best_splits(columns.double(), windows)
    with pytest.raises(ValueError, match=r"8 columns each, got \[3, 7\]"):
        op.best_splits(columns, windows[:, :7])
    assert [len(each) for each in op.best_splits(columns, windows[:0])] == [0, 0]
