"""ProcessGroupMesh: all processes as a grid, with process groups along its axes."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from .._distributed.groups import make_group

__all__ = ["ProcessGroupMesh"]


class ProcessGroupMesh:
    """A grid of all processes in row-major order; the product of its sizes is the number of processes."""

    def __init__(self, *size: int) -> None:
        connected = dist.is_available() and dist.is_initialized()
        assert connected, "torch.distributed is not initialised"
        world = dist.get_world_size()
        assert math.prod(size) == world, (
            f"a mesh of {' x '.join(map(str, size))} needs {math.prod(size)} processes; there are {world}"
        )
        self.shape = size
        self.rank = dist.get_rank()
        self._groups: dict[tuple[int, ...], Any] = {}

    def size(self, dim: int | None = None) -> Any:
        """Return the size of a dimension, or the shape."""
        return self.shape if dim is None else self.shape[dim]

    def coordinate(self, dim: int | None = None) -> Any:
        """Return this process's coordinate in a dimension, or all of them."""
        own = self.unravel(self.rank, self.shape)
        return own if dim is None else own[dim]

    @staticmethod
    def unravel(rank: int, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the coordinates of a rank."""
        if not 0 <= rank < math.prod(shape):
            raise ValueError(f"rank={rank} is outside of a mesh of shape {tuple(shape)}")
        coordinates = []
        for size in reversed(shape):
            rank, coordinate = divmod(rank, size)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates))

    @staticmethod
    def ravel(coord: Sequence[int], shape: Sequence[int], mode: str = "raise") -> int:
        """Return the rank at these coordinates. `mode` "wrap" or "clip" takes coordinates outside of the mesh."""
        assert mode in ("raise", "wrap", "clip"), f"mode={mode!r} is not known; use raise, wrap or clip"
        rank = 0
        for value, size in zip(coord, shape, strict=True):
            if mode == "raise" and not 0 <= value < size:
                raise ValueError(f"coord={tuple(coord)} is outside of a mesh of shape {tuple(shape)}")
            rank = rank * size + (value % size if mode == "wrap" else min(max(value, 0), size - 1))
        return rank

    def get_group_along_axis(
        self, axis: int | Sequence[int], indices_at_axis: Any = None, backend: str | None = None
    ) -> Any:
        """Return this process's group along one or several axes; all processes must ask for a new group together."""
        return self._groups.get(self._ranks(self.coordinate(), *self._choices(axis, indices_at_axis))) or (
            self.create_group_along_axis(axis, indices_at_axis, backend)
        )

    def create_group_along_axis(
        self, axis: int | Sequence[int], indices_at_axis: Any = None, backend: str | None = None
    ) -> Any:
        """Make all groups along one or several axes, and return this process's; None if it is in none of them.

        `indices_at_axis` are the coordinates that take part: a list, or a list for each axis; None means all. Groups
        that exist are used again. All processes must call it.
        """
        axes, indices = self._choices(axis, indices_at_axis)
        own = None
        others = [[0] if dim in axes else range(size) for dim, size in enumerate(self.shape)]
        for base in itertools.product(*others):
            ranks = self._ranks(base, axes, indices)
            if ranks not in self._groups:
                self._groups[ranks] = make_group(ranks, backend=backend)
            if self.rank in ranks:
                own = self._groups[ranks]
        return own

    def get_ranks_in_group(self, group: Any) -> list[int]:
        """Return the ranks of a group of this mesh."""
        return dist.get_process_group_ranks(group)

    def destroy_mesh_process_groups(self) -> None:
        """Destroy the groups of this mesh."""
        for group in self._groups.values():
            with contextlib.suppress(ValueError):  # destroyed already, or this process is not in it
                dist.destroy_process_group(group)
        self._groups.clear()

    def _choices(self, axis: Any, indices: Any) -> tuple[list[int], list[list[int]]]:
        """Return lists of the axes and of the coordinates along each."""
        axes = [axis] if isinstance(axis, int) else list(axis)
        axes = [dim % len(self.shape) for dim in axes]
        if indices is None:
            return axes, [list(range(self.shape[dim])) for dim in axes]
        return axes, [list(indices)] if isinstance(axis, int) else [list(each) for each in indices]

    def _ranks(self, base: Sequence[int], axes: list[int], indices: list[list[int]]) -> tuple[int, ...]:
        """Return the ranks at the coordinates `base`, with each choice of `indices` in place of its `axes`."""
        ranks = []
        for chosen in itertools.product(*indices):
            replaced = dict(zip(axes, chosen, strict=True))
            ranks.append(self.ravel([replaced.get(dim, value) for dim, value in enumerate(base)], self.shape))
        return tuple(sorted(ranks))
