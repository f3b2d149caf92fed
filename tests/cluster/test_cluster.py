"""Questions about the processes of a script, without processes; `tests/zero/zero_checks.py` asks in several."""

from __future__ import annotations

import pytest

from apex.cluster import DistCoordinator, ProcessGroupMesh


def test_torch_distributed_is_needed() -> None:
    with pytest.raises(AssertionError, match=r"torch\.distributed is not initialised"):
        DistCoordinator()
    with pytest.raises(AssertionError, match=r"torch\.distributed is not initialised"):
        ProcessGroupMesh(1)


def test_coordinates_are_row_major() -> None:
    shape = (2, 3, 4)
    for rank in range(24):
        coordinate = ProcessGroupMesh.unravel(rank, shape)
        assert coordinate == (rank // 12, rank // 4 % 3, rank % 4)
        assert ProcessGroupMesh.ravel(coordinate, shape) == rank
    assert ProcessGroupMesh.ravel((1, 4, -1), shape, "wrap") == ProcessGroupMesh.ravel((1, 1, 3), shape)
    assert ProcessGroupMesh.ravel((1, 4, -1), shape, "clip") == ProcessGroupMesh.ravel((1, 2, 0), shape)
    with pytest.raises(ValueError, match=r"coord=\(2, 0, 0\) is outside"):
        ProcessGroupMesh.ravel((2, 0, 0), shape)
    with pytest.raises(ValueError, match="rank=24 is outside"):
        ProcessGroupMesh.unravel(24, shape)
