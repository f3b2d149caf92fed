"""parallel_state in eight processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from apex.transformer import parallel_state
from tests.parallel.processes import run_checks
from tests.transformer import state_checks


@pytest.fixture(scope="module")
def in_eight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(state_checks.__name__, Path(tmp_path_factory.mktemp("eight")), processes=8)


@pytest.mark.parametrize("name", state_checks.CHECKS)
def test_eight_processes(name: str, in_eight: dict[str, str]) -> None:
    assert not in_eight[name], in_eight[name]


def test_a_process_group_is_needed() -> None:
    with pytest.raises(AssertionError, match="init_process_group first"):
        parallel_state.initialize_model_parallel()
