"""Numbers of microbatches."""

from __future__ import annotations

import pytest

from apex.transformer.microbatches import (
    ConstantNumMicroBatches,
    RampupBatchsizeNumMicroBatches,
    build_num_microbatches_calculator,
)


def test_constant() -> None:
    calculator = build_num_microbatches_calculator(0, None, 32, 2, 4)
    assert isinstance(calculator, ConstantNumMicroBatches)
    calculator.update(1000, True)
    assert (calculator.get(), calculator.get_current_global_batch_size()) == (4, 32)
    with pytest.raises(AssertionError, match=r"\(30\) is not divisible by micro batch size \(2\)"):
        ConstantNumMicroBatches(30, 2, 4)


def test_growing() -> None:
    """The batch grows from 256 by 128 to 512 in two steps of 250 samples."""
    calculator = build_num_microbatches_calculator(0, [256, 128, 500], 512, 4, 2)
    assert isinstance(calculator, RampupBatchsizeNumMicroBatches)
    for consumed, size in ((0, 256), (249, 256), (250, 384), (499, 384), (500, 512), (501, 512), (10_000, 512)):
        calculator.update(consumed, True)
        assert (calculator.get_current_global_batch_size(), calculator.get()) == (size, size // 8), consumed


@pytest.mark.parametrize("ramp", [[512, 128, 500], [256, 128, 0]])
def test_nothing_to_grow(ramp: list[int]) -> None:
    calculator = build_num_microbatches_calculator(1, ramp, 512, 4, 2)
    for consumed in (0, 1, 500, 501):
        calculator.update(consumed, True)
        assert calculator.get_current_global_batch_size() == 512


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"must be \[start batch size, increment, samples\], got \[1, 2\]"):
        build_num_microbatches_calculator(0, [1, 2], 512, 4, 2)
    with pytest.raises(AssertionError, match="to be divisible by global batch size increment"):
        RampupBatchsizeNumMicroBatches(256, 100, 500, 512, 4, 2)
    calculator = RampupBatchsizeNumMicroBatches(4, 4, 500, 512, 4, 2)
    with pytest.raises(AssertionError, match=r"\(4\) is not divisible by micro-batch-size"):
        calculator.update(0, True)
    assert calculator.get_current_global_batch_size() == 4
