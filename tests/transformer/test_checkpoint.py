"""Checkpoints of split models, in four processes and in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.processes import run_checks

from . import checkpoint_checks


@pytest.fixture(scope="module")
def in_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(checkpoint_checks.__name__, Path(tmp_path_factory.mktemp("checkpoint")), processes=4)


@pytest.mark.parametrize("name", checkpoint_checks.CHECKS)
def test_four_processes(name: str, in_four: dict[str, str]) -> None:
    assert not in_four[name], in_four[name]
