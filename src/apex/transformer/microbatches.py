"""Calculators of the number of microbatches in a global batch, which may grow during training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from .._arguments import Index, checked
from .log_util import get_transformer_logger

logger = get_transformer_logger(__name__)


@checked
def build_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int | str] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
) -> NumMicroBatchesCalculator:
    """Return a calculator for a constant global batch, or for a growing one if `rampup_batch_size` is given.

    `rampup_batch_size` is [first size, increment, number of samples until the full size].
    """
    if rampup_batch_size is None:
        calculator: NumMicroBatchesCalculator = ConstantNumMicroBatches(
            global_batch_size, micro_batch_size, data_parallel_size
        )
        words = f"setting number of micro-batches to constant {calculator.get()}"
    else:
        if len(rampup_batch_size) != 3:
            raise ValueError(
                f"rampup_batch_size must be [start batch size, increment, samples], got {rampup_batch_size}"
            )
        try:
            start, increment, samples = (int(number) for number in rampup_batch_size)
        except ValueError:
            raise ValueError(f"rampup_batch_size must be three integers, got {rampup_batch_size}") from None
        words = f"batch size grows from {start} by {increment} to {global_batch_size} over {samples} samples"
        calculator = RampupBatchsizeNumMicroBatches(
            start, increment, samples, global_batch_size, micro_batch_size, data_parallel_size
        )
    if rank == 0:
        logger.info(words)
    return calculator


class NumMicroBatchesCalculator(ABC):
    """The number of microbatches of a step, and of samples that all ranks process in it."""

    def __init__(self) -> None:
        self.num_micro_batches: int | None = None
        self.current_global_batch_size: int | None = None

    def get(self) -> int | None:
        """Return the number of microbatches."""
        return self.num_micro_batches

    def get_current_global_batch_size(self) -> int | None:
        """Return the number of samples."""
        return self.current_global_batch_size

    @abstractmethod
    def update(self, consumed_samples: Index, consistency_check: bool) -> None:
        """Update both numbers for the next step, given the number of samples consumed so far."""


def _positive(**numbers: int) -> None:
    for name, number in numbers.items():
        assert number > 0, f"{name} must be positive, got {number}"


class ConstantNumMicroBatches(NumMicroBatchesCalculator):
    """A number of microbatches that is the same in every step."""

    @checked
    def __init__(self, global_batch_size: int, micro_batch_size: int, data_parallel_size: int) -> None:
        super().__init__()
        _positive(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            data_parallel_size=data_parallel_size,
        )
        samples = micro_batch_size * data_parallel_size
        assert global_batch_size % samples == 0, (
            f"global batch size ({global_batch_size}) is not divisible by micro batch size ({micro_batch_size}) times "
            f"data parallel size ({data_parallel_size})"
        )
        self.num_micro_batches = global_batch_size // samples
        self.current_global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size

    @checked
    def update(self, consumed_samples: Index, consistency_check: bool) -> None:
        """Do nothing, because the numbers are constant."""


class RampupBatchsizeNumMicroBatches(NumMicroBatchesCalculator):
    """A global batch that grows from `start_batch_size` to `global_batch_size` evenly over `ramup_samples` samples."""

    @checked
    def __init__(
        self,
        start_batch_size: int,
        batch_size_increment: int,
        ramup_samples: int,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
    ) -> None:
        super().__init__()
        _positive(
            start_batch_size=start_batch_size,
            batch_size_increment=batch_size_increment,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            data_parallel_size=data_parallel_size,
        )
        assert ramup_samples >= 0, f"ramup_samples must not be negative, got {ramup_samples}"
        growth = global_batch_size - start_batch_size
        assert growth >= 0, f"start batch size {start_batch_size} is above global batch size {global_batch_size}"
        assert growth % batch_size_increment == 0, (
            f"expected global batch size interval ({growth}) to be divisible by global batch size increment "
            f"({batch_size_increment})"
        )
        self.micro_batch_size, self.data_parallel_size = micro_batch_size, data_parallel_size
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.start_batch_size, self.global_batch_size = start_batch_size, global_batch_size
        self.batch_size_increment, self.ramup_samples = batch_size_increment, ramup_samples
        steps = growth // batch_size_increment
        self.rampup_samples_per_increment = ramup_samples / steps if steps else 0.0
        self.update(0, False)

    @checked
    def update(self, consumed_samples: Index, consistency_check: bool) -> None:
        """Set the sizes; `consistency_check` asserts that the global batch has whole microbatches on all ranks."""
        size = self.global_batch_size
        if consumed_samples <= self.ramup_samples and self.rampup_samples_per_increment:
            steps = int(consumed_samples / self.rampup_samples_per_increment)
            size = min(size, self.start_batch_size + steps * self.batch_size_increment)
        if consistency_check:
            assert size % self.micro_batch_times_data_parallel_size == 0, (
                f"current global batch size ({size}) is not divisible by micro-batch-size ({self.micro_batch_size}) "
                f"times data parallel size ({self.data_parallel_size})"
            )
        self.current_global_batch_size = size
        self.num_micro_batches = size // self.micro_batch_times_data_parallel_size
