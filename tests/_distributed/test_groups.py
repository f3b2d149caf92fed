"""Process groups and meshes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests._distributed import group_checks
from tests.parallel.processes import run_checks


@pytest.fixture(scope="module")
def in_six(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(group_checks.__name__, Path(tmp_path_factory.mktemp("groups")), processes=6)


@pytest.mark.parametrize("name", group_checks.CHECKS)
def test_six_processes(name: str, in_six: dict[str, str]) -> None:
    assert not in_six[name], in_six[name]
