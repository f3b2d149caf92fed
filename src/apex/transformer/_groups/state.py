"""State of `apex.transformer.parallel_state`: one object per process, with the groups and the ranks in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from .layout import ParallelSizes
from .process_groups import ModelParallelGroups


@dataclass
class State:
    """The state that `initialize_model_parallel` and the setters keep; a new instance is the uninitialized state."""

    groups: ModelParallelGroups = field(default_factory=ModelParallelGroups)
    sizes: ParallelSizes | None = None
    mesh: torch.Tensor | None = None
    device_mesh: Any = None
    mpi_group: Any = None
    virtual_rank: int | None = None
    virtual_size: int | None = None
    split_rank: int | None = None
    # Values of the setters, which take precedence over the groups.
    rank_overrides: dict[str, int | None] = field(default_factory=dict)
    size_overrides: dict[str, int | None] = field(default_factory=dict)

    def become(self, other: State) -> None:
        """Take all values of another state."""
        vars(self).update(vars(other))

    @property
    def initialized(self) -> bool:
        """Return True if the groups exist."""
        return "data" in self.groups.by_kind

    def group(self, kind: str, name: str) -> Any:
        """Return this rank's group of a kind, or raise an AssertionError that calls it `name`."""
        group = self.groups.by_kind.get(kind)
        if group is None:
            raise AssertionError(f"{name} is not initialized: {self._missing(kind)}")
        return group

    def _missing(self, kind: str) -> str:
        """Return the reason why a group does not exist, and what to do, for an error message."""
        if not self.initialized:
            return (
                "call torch.distributed.init_process_group and "
                "apex.transformer.parallel_state.initialize_model_parallel before layers, losses and schedules of "
                "apex.transformer are used, in one process too"
            )
        if kind == "amax_reduction":
            return "initialize_model_parallel was called without use_fp8_=True"
        return f"rank {dist.get_rank()} is in none of them"

    def size(self, kind: str, name: str) -> int:
        """Return the number of ranks of a kind of group, or the value of a setter."""
        override = self.size_overrides.get(kind)
        return dist.get_world_size(self.group(kind, name)) if override is None else override

    def rank(self, kind: str, name: str) -> int:
        """Return this process's rank in a kind of group, or the value of a setter."""
        override = self.rank_overrides.get(kind)
        return dist.get_rank(self.group(kind, name)) if override is None else override

    def member(self, kind: str, index: int) -> int:
        """Return the global rank of a member of this rank's group; indices wrap around."""
        ranks = self.groups.ranks.get(kind)
        if ranks is None:
            raise AssertionError(f"{kind} parallel group is not initialized: {self._missing(kind)}")
        return ranks[index % len(ranks)]


STATE = State()
