"""The compiled names of the permutation search against sums over permuted matrices."""

from __future__ import annotations

import itertools

import pytest

import permutation_search_cuda as compiled
from apex.contrib.sparsity.permutation_search_kernels import sum_after_2_to_4

numpy = pytest.importorskip("numpy")
MATRIX = numpy.random.RandomState(0).randn(10, 12).astype("float32")


def test_sum_of_a_range_of_columns() -> None:
    output = numpy.zeros(1, dtype="float32")
    assert compiled.sum_after_2_to_4(MATRIX, 10, 12, 4, 12, 32, 128, output) == 0
    assert output[0] == pytest.approx(sum_after_2_to_4(MATRIX[:, 4:12]))


def test_best_permutation_of_groups() -> None:
    groups = numpy.array(list(itertools.combinations(range(3), 2)), dtype="uint32")
    orders = numpy.array([list(range(8)), [0, 1, 2, 4, 3, 5, 6, 7], [4, 1, 6, 3, 0, 5, 2, 7]], dtype="uint32")
    for function, sizes in ((compiled.build_permute_map, (3, 2)), (compiled.check_permutations, (2, 3))):
        gains, best = numpy.zeros(3, dtype="float32"), numpy.zeros(3, dtype="uint32")
        function(MATRIX, 10, 12, groups, *sizes, orders.flatten(), 3, gains, best)
        for (one, other), gain, index in zip(groups.tolist(), gains, best, strict=True):
            window = [*range(4 * one, 4 * one + 4), *range(4 * other, 4 * other + 4)]
            kept = [sum_after_2_to_4(MATRIX[:, [window[i] for i in order]]) for order in orders]
            assert index == kept.index(max(kept))
            assert gain == pytest.approx(max(kept) - kept[0], abs=1e-4)


def test_gains_of_all_swaps() -> None:
    pairs = numpy.array([[0, 2], [1, 2]], dtype="uint32")
    output = numpy.zeros(32, dtype="float32")
    compiled.build_swap_map(MATRIX, 10, 12, pairs, output)
    for number, (one, other) in enumerate(pairs.tolist()):
        for i, j in itertools.product(range(4), range(4)):
            order = list(range(12))
            order[4 * one + i], order[4 * other + j] = 4 * other + j, 4 * one + i
            expected = sum_after_2_to_4(MATRIX[:, order]) - sum_after_2_to_4(MATRIX)
            assert output[16 * number + 4 * i + j] == pytest.approx(expected, abs=1e-4)
