"""Pipelines in two and four processes, and with replicas and split layers in eight."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.processes import run_checks

from . import hybrid_checks, pipeline_checks


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = Path(tmp_path_factory.mktemp("pipeline"))
    return run_checks(pipeline_checks.__name__, folder, processes=request.param)


@pytest.mark.parametrize("name", pipeline_checks.CHECKS)
def test_processes(name: str, found: dict[str, str]) -> None:
    assert not found[name], found[name]


@pytest.fixture(scope="module")
def in_eight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(hybrid_checks.__name__, Path(tmp_path_factory.mktemp("eight")), processes=8)


@pytest.mark.parametrize("name", hybrid_checks.CHECKS)
def test_eight_processes(name: str, in_eight: dict[str, str]) -> None:
    assert not in_eight[name], in_eight[name]
