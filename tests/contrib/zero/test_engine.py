"""The engine in one, two and four processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contrib.zero import engine_checks
from tests.parallel.processes import run_checks


@pytest.fixture(scope="module", params=[1, 2, 4])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(engine_checks.__name__, Path(tmp_path_factory.mktemp("engine")), processes=request.param)


@pytest.mark.parametrize("name", engine_checks.CHECKS)
def test_processes(name: str, found: dict[str, str]) -> None:
    assert not found[name], found[name]
