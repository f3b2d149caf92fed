"""GPT with experts in two, four and eight processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.processes import run_checks

from . import moe_checks


@pytest.fixture(scope="module", params=[2, 4, 8])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(moe_checks.__name__, Path(tmp_path_factory.mktemp("experts")), processes=request.param)


@pytest.mark.parametrize("name", moe_checks.CHECKS)
def test_equals_one_process(name: str, found: dict[str, str]) -> None:
    assert not found[name], found[name]
