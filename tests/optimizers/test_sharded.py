"""Sharded parameters (DTensor): every optimizer gives the numbers of one process that has the parameters whole."""

from pathlib import Path

import pytest

from tests.optimizers import every_sharding_checks, sharded_checks, sharded_format_checks
from tests.parallel.processes import needs_fsdp_on_a_cpu, run_checks


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(sharded_checks.__name__, Path(tmp_path_factory.mktemp("sharded")))


@needs_fsdp_on_a_cpu
@pytest.mark.parametrize("name", sharded_checks.CHECKS)
def test_fully_sharded_parameters(name: str, in_two: dict[str, str]) -> None:
    assert not in_two[name], in_two[name]


@pytest.fixture(scope="module")
def in_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(every_sharding_checks.__name__, Path(tmp_path_factory.mktemp("every")), processes=4)


@needs_fsdp_on_a_cpu
@pytest.mark.parametrize("name", every_sharding_checks.CHECKS)
def test_every_sharding_of_every_optimizer(name: str, in_four: dict[str, str]) -> None:
    assert not in_four[name], in_four[name]


@pytest.fixture(scope="module")
def formats_in_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(sharded_format_checks.__name__, Path(tmp_path_factory.mktemp("formats")), processes=4)


@needs_fsdp_on_a_cpu
@pytest.mark.parametrize("name", sharded_format_checks.CHECKS)
def test_state_formats_of_shards(name: str, formats_in_four: dict[str, str]) -> None:
    assert not formats_in_four[name], formats_in_four[name]
