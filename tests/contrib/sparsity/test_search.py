"""The search for an order of columns."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from apex.contrib.sparsity import permutation_search_kernels as kernels
from apex.contrib.sparsity.permutation_search_kernels import _search

numpy = pytest.importorskip("numpy")


def uniform(rows: int, columns: int):
    return numpy.random.RandomState(1).rand(rows, columns).astype("float32")


def test_as_good_as_upstream() -> None:
    """2852.38 without a permutation; upstream's search keeps 2919.76."""
    matrix = uniform(128, 64)
    assert round(kernels.sum_after_2_to_4(matrix), 2) == 2852.38
    order = kernels.accelerated_search_for_good_permutation(matrix)
    assert sorted(order) == list(range(64))
    assert kernels.sum_after_2_to_4(matrix[:, order]) > 2919.77
    assert order == kernels.accelerated_search_for_good_permutation(torch.from_numpy(matrix))  # the same each time


@pytest.mark.parametrize("columns", [8, 12])
def test_narrow_matrices_are_searched_exhaustively(columns: int) -> None:
    matrix = uniform(6, columns)
    found, seconds, order = kernels.Exhaustive_Search(matrix)
    assert seconds > 0
    assert (found == matrix[:, order]).all()
    if columns == 8:
        orders = ((0, *chosen, *(set(range(1, 8)) - set(chosen))) for chosen in itertools.combinations(range(1, 8), 3))
        best = max(kernels.sum_after_2_to_4(matrix[:, list(each)]) for each in orders)
        assert kernels.sum_after_2_to_4(found) == pytest.approx(best)
    else:
        by_pairs = kernels.Exhaustive_Search(matrix, 8)[0]
        assert kernels.sum_after_2_to_4(found) >= kernels.sum_after_2_to_4(by_pairs) - 1e-4


def test_wider_windows_find_more_and_orders_go_on() -> None:
    matrix = uniform(16, 32)
    pairs, _, order = kernels.Channel_Swap(matrix)
    wide, _, further = kernels.Exhaustive_Search(matrix, 12, permutation=order)
    assert kernels.sum_after_2_to_4(wide) > kernels.sum_after_2_to_4(pairs)
    assert (wide == matrix[:, further]).all()
    with pytest.raises(ValueError, match="too many to look at"):
        kernels.Exhaustive_Search(matrix)


def test_a_spent_budget_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.from_numpy(uniform(16, 64))
    now = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    order = _search.search(matrix, time_budget=0.5)
    assert sorted(order) == list(range(64))
    assert kernels.sum_after_2_to_4(matrix[:, order]) > kernels.sum_after_2_to_4(matrix)


def test_long_searches_show_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(_search, "_PATIENCE", -1.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    _search.search(torch.from_numpy(uniform(4, 32)), escape_attempts=2)
    assert "permutation search 4x32" in capsys.readouterr().err


def test_utilities() -> None:
    matrix = numpy.array([[4.0, -3.0, 2.0, 1.0, 8.0, -7.0, 6.0, 5.0]], dtype="float32")
    assert kernels.apply_2_to_4(matrix).tolist() == [[4, -3, 0, 0, 8, -7, 0, 0]]
    assert kernels.sum_after_2_to_4(matrix) == 22
    assert kernels.try_swap(matrix, 1, 6) == kernels.sum_after_2_to_4(matrix[:, [0, 6, 2, 3, 4, 5, 1, 7]]) - 22
    assert kernels.unstructured_prune(matrix, 0.5).tolist() == [[0, 0, 0, 0, 8, -7, 6, 5]]
    assert kernels.magnitude_after_pruning_rows(matrix) == 26
    assert kernels.efficacy(1.0, 3.0, 2.0) == 0.5
    assert kernels.efficacy(1.0, 1.0, 1.0) == 1.0
    with pytest.raises(ValueError, match="strategy 'lucky' is not known"):
        kernels.accelerated_search_for_good_permutation(matrix, {"strategy": "lucky"})
    assert kernels.accelerated_search_for_good_permutation(matrix, {"strategy": "user defined"}) == list(range(8))
    with pytest.raises(ValueError, match="multiple of 4 columns, got 7"):
        kernels.accelerated_search_for_good_permutation(matrix[:, :7])
