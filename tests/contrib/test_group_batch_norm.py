"""apex.contrib.groupbn, apex.contrib.cudnn_gbn, bnp and cudnn_gbn_lib in two and in four processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contrib import group_batch_norm_checks, group_batch_norm_four_checks
from tests.parallel.processes import run_checks


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(group_batch_norm_checks.__name__, Path(tmp_path_factory.mktemp("two")))


@pytest.fixture(scope="module")
def in_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(group_batch_norm_four_checks.__name__, Path(tmp_path_factory.mktemp("four")), processes=4)


@pytest.mark.parametrize("name", group_batch_norm_checks.CHECKS)
def test_two_processes(name: str, in_two: dict[str, str]) -> None:
    assert not in_two[name], in_two[name]


@pytest.mark.parametrize("name", group_batch_norm_four_checks.CHECKS)
def test_four_processes(name: str, in_four: dict[str, str]) -> None:
    assert not in_four[name], in_four[name]
