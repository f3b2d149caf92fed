"""The process mesh and the pipeline stage of this process, with the original's class names."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..._distributed.groups import make_mesh
from ...ops._host import default_device
from ...transformer.pipeline_parallel._schedule import Placement


class GroupMesh(NamedTuple):
    """A mesh of ranks in row-major order, and this process's group along each axis."""

    shape: tuple[int, ...]
    groups: tuple[Any, ...]

    @property
    def rank(self) -> int:
        """The number of this process."""
        return dist.get_rank()

    def size(self, dim: int | None = None) -> int | tuple[int, ...]:
        """Return the number of processes along an axis, or along all axes."""
        return self.shape if dim is None else self.shape[dim]

    def coordinate(self, dim: int | None = None) -> int | tuple[int, ...]:
        """Return the coordinate of this process along an axis, or along all axes."""
        strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        coordinates = tuple(self.rank // stride % size for stride, size in zip(strides, self.shape, strict=True))
        return coordinates if dim is None else coordinates[dim]

    def get_group_along_axis(self, axis: int) -> Any:
        """Return the group of the processes that differ from this one along an axis only."""
        return self.groups[axis]

    def get_ranks_in_group(self, group: Any) -> list[int]:
        """Return the ranks of a group's processes."""
        return dist.get_process_group_ranks(group)


class StageManager(NamedTuple):
    """The pipeline rank of this process: number `stage` of `num_stages` ranks, each with one or more chunks."""

    placement: Placement
    stage: int

    @property
    def num_stages(self) -> int:
        """The number of ranks of the pipeline."""
        return self.placement.ranks

    def is_first_stage(self, ignore_chunk: bool = False) -> bool:
        """Return whether this process has the first stage, which is on the first rank of the pipeline."""
        return self.stage == 0

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:
        """Return whether this process has the last stage, or with `ignore_chunk` is the last rank of the pipeline.

        With the schedule "zbv" the first rank has the last stage.
        """
        last_rank = self.num_stages - 1
        return self.stage == (last_rank if ignore_chunk else self.placement.holder(self.placement.stages - 1)[0])


def mesh_of_all(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """Make a DeviceMesh of all processes on the accelerator, or on the default device if there is none."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return make_mesh((accelerator or default_device()).type, shape, names)
