"""Layers and losses that take DTensors, in two processes."""

from pathlib import Path

import pytest

from tests._distributed import dtensor_checks
from tests.parallel.processes import run_checks


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(dtensor_checks.__name__, Path(tmp_path_factory.mktemp("dtensors")))


@pytest.mark.parametrize("name", dtensor_checks.CHECKS)
def test_distributed_tensors(name: str, in_two: dict[str, str]) -> None:
    assert not in_two[name], in_two[name]
