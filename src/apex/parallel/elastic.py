"""A data loader for runs that are stopped and resumed, in any number of processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from .._arguments import Count, Index, checked
from ..ops._checks import integer
from ..ops._host import HOST

__all__ = ["ElasticLoader"]


class ElasticLoader:
    """A DataLoader over global batches with a position that can be saved and loaded.

    A global batch has `batch_size` samples, and each process gets an equal part of it, in the order of ranks. The
    position counts global batches, so that a run in another number of processes continues with the same samples. An
    iteration yields the rest of the current epoch. Samples that fill no global batch are left out of an epoch; with
    `shuffle` each epoch has another order, which depends on `seed` alone.

    Batches count as taken when they are yielded, not when workers read them in advance. `rank` and `ranks` default to
    the default process group's. Other options are DataLoader's.
    """

    @checked
    def __init__(
        self,
        dataset: Any,
        batch_size: Count,
        *,
        shuffle: bool = False,
        seed: Index = 0,
        rank: Index | None = None,
        ranks: Count | None = None,
        **options: Any,
    ) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(f"dataset must have __len__ and __getitem__, which {type(dataset).__name__} has not")
        if (rank is None) != (ranks is None):
            raise ValueError(f"rank and ranks must be given together, got rank={rank} and ranks={ranks}")
        if rank is None or ranks is None:
            connected = dist.is_available() and dist.is_initialized()
            rank, ranks = (dist.get_rank(), dist.get_world_size()) if connected else (0, 1)
        if rank >= ranks:
            raise ValueError(f"rank must be less than ranks={ranks}, got {rank}")
        if batch_size % ranks:
            raise ValueError(f"batch_size={batch_size} samples cannot be divided equally among {ranks} processes")
        if len(dataset) < batch_size:
            raise ValueError(f"dataset has {len(dataset)} samples, fewer than a global batch of {batch_size}")
        refused = sorted({"batch_sampler", "sampler", "drop_last", "generator"} & options.keys())
        if refused:
            raise TypeError(f"{refused[0]} cannot be given: the order of samples follows from shuffle and seed")
        if not options.get("in_order", True):
            raise ValueError("in_order must be True: a position counts batches, so they must come in their order")
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self.epoch = 0
        # Global batches of this epoch that were yielded.
        self.taken = 0
        self._rank, self._ranks = rank, ranks
        # Seeds of workers come from a generator of the loader's own: the default one is the user's.
        self._generator = torch.Generator(HOST)
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=_Batches(self), generator=self._generator, **options
        )

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""
        return len(self.dataset) // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        self._generator.manual_seed(self.seed + self.epoch)
        # DataLoader draws the workers' seed on the default device, which the generator has to be of.
        with torch.device(HOST):
            batches = iter(self._loader)
        for batch in batches:
            self.taken += 1
            position = self.epoch, self.taken
            yield batch
            if (self.epoch, self.taken) != position:  # the next batch of this iteration is not the one at the position
                raise RuntimeError(
                    "the position of the loader has changed since the last batch: a state was loaded, or another "
                    "iteration has begun; leave this iteration and begin a new one"
                )
        self.epoch, self.taken = self.epoch + 1, 0

    def indices(self) -> Iterator[list[int]]:
        """Yield this process's samples of each global batch from the position to the end of the epoch."""
        count = len(self.dataset)
        order = list(range(count))
        if self.shuffle:
            generator = torch.Generator(HOST).manual_seed(self.seed + self.epoch)
            order = torch.randperm(count, generator=generator, dtype=torch.int64, device=HOST).tolist()
        size = self.batch_size // self._ranks
        for number in range(self.taken, len(self)):
            first = number * self.batch_size + self._rank * size
            yield order[first : first + size]

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the options that the order of samples depends on."""
        return {"epoch": self.epoch, "taken": self.taken, **self._order()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the position of the next iteration; raise ValueError if the order of samples was another.

        An iteration that has begun cannot go on unless its position is the same.
        """
        missing = self.state_dict().keys() - state_dict.keys() if isinstance(state_dict, Mapping) else {"epoch"}
        if missing:
            raise ValueError(f"state_dict is not that of an ElasticLoader: it has no {', '.join(sorted(missing))}")
        for name, value in self._order().items():
            if state_dict[name] != value:
                raise ValueError(f"the saved position is of {name}={state_dict[name]}, and this loader has {value}")
        epoch, taken = integer("epoch", state_dict["epoch"]), integer("taken", state_dict["taken"])
        if epoch < 0:
            raise ValueError(f"the saved position is epoch {epoch}, and the first one is 0")
        if not 0 <= taken <= len(self):
            raise ValueError(f"the saved position is batch {taken}, but an epoch has {len(self)} of them")
        self.epoch, self.taken = epoch, taken

    def _order(self) -> dict[str, Any]:
        samples = len(self.dataset)
        return {"samples": samples, "batch_size": self.batch_size, "shuffle": self.shuffle, "seed": self.seed}


class _Batches:
    """The batch sampler of an `ElasticLoader`; DataLoader iterates over it once for each epoch."""

    def __init__(self, loader: ElasticLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self._loader.indices()

    def __len__(self) -> int:
        return len(self._loader)
