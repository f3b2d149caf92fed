"""Pipelines in two and in four processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.processes import run_checks

from . import pipeline_checks


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = Path(tmp_path_factory.mktemp("pipeline"))
    return run_checks(pipeline_checks.__name__, folder, processes=request.param)


@pytest.mark.parametrize("name", pipeline_checks.CHECKS)
def test_processes(name: str, found: dict[str, str]) -> None:
    assert not found[name], found[name]
