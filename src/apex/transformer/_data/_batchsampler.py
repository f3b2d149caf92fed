"""Batch samplers that resume where a run stopped; the batch size may change between batches."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..._arguments import Count, Index, checked
from ...ops._host import HOST


class _Base:
    """Base of the samplers; `local_minibatch_size`, the batch size of one rank, may be set at any time."""

    def __init__(
        self,
        total_samples: int,
        consumed_samples: Index,
        local_minibatch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        error: type[Exception],
    ) -> None:
        if total_samples <= 0:
            raise error(f"no sample to consume: total_samples is {total_samples}")
        if local_minibatch_size <= 0:
            raise error(f"local_minibatch_size must be positive, got {local_minibatch_size}")
        if data_parallel_size <= 0:
            raise error(f"data_parallel_size must be positive, got {data_parallel_size}")
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise error(
                f"data_parallel_rank must be from 0 to data_parallel_size - 1, got {data_parallel_rank} of "
                f"{data_parallel_size}"
            )
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.local_minibatch_size = local_minibatch_size

    def __len__(self) -> int:
        return self.total_samples

    @property
    def local_minibatch_size(self) -> int:
        """Return the number of samples of one rank's batch."""
        return self._local_minibatch_size

    @local_minibatch_size.setter
    @checked
    def local_minibatch_size(self, new_local_minibatch_size: Count) -> None:
        self._local_minibatch_size = new_local_minibatch_size
        self.local_minibatch_times_data_parallel_size = new_local_minibatch_size * self.data_parallel_size


class MegatronPretrainingSampler(_Base):
    """A sampler that takes samples in order; each rank gets its part of every global batch."""

    @checked
    def __init__(
        self,
        total_samples: int,
        consumed_samples: Index,
        local_minibatch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
    ) -> None:
        sizes = (local_minibatch_size, data_parallel_rank, data_parallel_size)
        super().__init__(total_samples, consumed_samples, *sizes, RuntimeError)
        if consumed_samples >= total_samples:
            raise RuntimeError(f"no samples left to consume: {consumed_samples}, {total_samples}")
        self.drop_last = drop_last

    def get_start_end_idx(self) -> tuple[int, int]:
        """Return start and end of this rank's part of a global batch."""
        start = self.data_parallel_rank * self.local_minibatch_size
        return start, start + self.local_minibatch_size

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in range(self.consumed_samples, self.total_samples):
            batch.append(index)
            if len(batch) == self.local_minibatch_times_data_parallel_size:
                start, end = self.get_start_end_idx()
                yield batch[start:end]
                batch = []
        if batch and not self.drop_last:
            start, end = self.get_start_end_idx()
            yield batch[start:end]


class MegatronPretrainingRandomSampler(_Base):
    """A sampler that shuffles each rank's own part of the samples, differently in every epoch.

    Samples that do not fill a global batch are dropped. `consumed_samples` advances with every batch taken.
    """

    @checked
    def __init__(
        self,
        total_samples: int,
        consumed_samples: Index,
        local_minibatch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        sizes = (local_minibatch_size, data_parallel_rank, data_parallel_size)
        super().__init__(total_samples, consumed_samples, *sizes, ValueError)
        self.last_batch_size = total_samples % self.local_minibatch_times_data_parallel_size

    def __iter__(self) -> Iterator[list[int]]:
        usable = self.total_samples - self.last_batch_size
        if usable < self.local_minibatch_times_data_parallel_size:
            raise ValueError(
                f"{usable or self.total_samples} samples are fewer than a global batch of "
                f"{self.local_minibatch_times_data_parallel_size}"
            )
        epoch, used = divmod(self.consumed_samples, usable)
        if usable - used < self.local_minibatch_times_data_parallel_size:
            # The batch size has changed, and the rest of the epoch is less than a batch: it would never be consumed.
            epoch, used = epoch + 1, 0
            self.consumed_samples = epoch * usable
        samples_per_rank = usable // self.data_parallel_size
        first = self.data_parallel_rank * samples_per_rank
        generator = torch.Generator(HOST).manual_seed(epoch)
        order = torch.randperm(samples_per_rank, generator=generator, dtype=torch.int64, device=HOST).tolist()
        batch: list[int] = []
        for index in order[used // self.data_parallel_size :]:
            batch.append(first + index)
            if len(batch) == self.local_minibatch_size:
                self.consumed_samples += self.local_minibatch_times_data_parallel_size
                yield batch
                batch = []
