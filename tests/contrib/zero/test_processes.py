"""The engine and DistributedFusedAdam in one, two and four processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.contrib.zero import four_checks, two_checks
from tests.parallel.processes import run_checks


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(two_checks.__name__, Path(tmp_path_factory.mktemp("two")))


@pytest.fixture(scope="module")
def in_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(four_checks.__name__, Path(tmp_path_factory.mktemp("four")), processes=4)


@pytest.fixture
def world_of_one(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
@pytest.mark.parametrize("name", two_checks.CHECKS)
def test_one_process(name: str, world_of_one: None) -> None:
    torch.manual_seed(0)
    two_checks.CHECKS[name](0)


@pytest.mark.parametrize("name", two_checks.CHECKS)
def test_two_processes(name: str, in_two: dict[str, str]) -> None:
    assert not in_two[name], in_two[name]


@pytest.mark.parametrize("name", four_checks.CHECKS)
def test_four_processes(name: str, in_four: dict[str, str]) -> None:
    assert not in_four[name], in_four[name]
