"""GPT and BERT on split layers, in four and eight processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.processes import run_checks

from . import grid_checks, model_checks


@pytest.fixture(scope="module")
def in_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(model_checks.__name__, Path(tmp_path_factory.mktemp("four")), processes=4)


@pytest.mark.parametrize("name", model_checks.CHECKS)
def test_four_processes(name: str, in_four: dict[str, str]) -> None:
    assert not in_four[name], in_four[name]


@pytest.fixture(scope="module")
def in_eight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(grid_checks.__name__, Path(tmp_path_factory.mktemp("eight")), processes=8)


@pytest.mark.parametrize("name", grid_checks.CHECKS)
def test_eight_processes(name: str, in_eight: dict[str, str]) -> None:
    assert not in_eight[name], in_eight[name]
