"""Parameters sharded by FSDP2: shards are updated alone, or with norms of whole parameters; some refuse them."""

from pathlib import Path

import pytest

from tests.optimizers import sharded_checks
from tests.parallel.processes import needs_fsdp_on_a_cpu, run_checks


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(sharded_checks.__name__, Path(tmp_path_factory.mktemp("sharded")))


@needs_fsdp_on_a_cpu
@pytest.mark.parametrize("name", sharded_checks.CHECKS)
def test_fully_sharded_parameters(name: str, in_two: dict[str, str]) -> None:
    assert not in_two[name], in_two[name]
