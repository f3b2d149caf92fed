"""apex.contrib.bottleneck, peer_memory and their compiled names in two and in four processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contrib.spatial import checks
from tests.parallel.processes import run_checks


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(checks.__name__, Path(tmp_path_factory.mktemp("ranks")), processes=request.param)


@pytest.mark.parametrize("name", checks.CHECKS)
def test_in_processes(name: str, found: dict[str, str]) -> None:
    assert not found[name], found[name]
