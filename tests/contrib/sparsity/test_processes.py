"""Pruned models in two processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contrib.sparsity import process_checks
from tests.parallel.processes import run_checks


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(process_checks.__name__, Path(tmp_path_factory.mktemp("sparsity")))


@pytest.mark.parametrize("name", process_checks.CHECKS)
def test_zeros_stay_in_two_processes(name: str, in_two: dict[str, str]) -> None:
    assert not in_two[name], in_two[name]
