"""The Booster in one, two and four processes; what two have saved, one and four go on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.booster import alone_checks, four_checks, hybrid_checks, hybrid_four_checks, process_checks
from tests.parallel.processes import run_checks

pytest.importorskip("safetensors")
RUNS = {
    "two": (process_checks, 2),
    "one": (alone_checks, 1),
    "four": (four_checks, 4),
    "split": (hybrid_checks, 2),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What became of the checks of each run; folders are named like it."""
    folder = Path(tmp_path_factory.mktemp("booster"))
    results = {}
    for name, (module, processes) in RUNS.items():
        (folder / name).mkdir()
        results[name] = run_checks(module.__name__, folder / name, processes=processes, timeout=250)
    return results


@pytest.mark.parametrize(("run", "name"), [(run, name) for run, (module, _) in RUNS.items() for name in module.CHECKS])
def test_processes(run: str, name: str, found: dict[str, dict[str, str]]) -> None:
    assert not found[run][name], found[run][name]


@pytest.fixture(scope="module")
def split_in_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(hybrid_four_checks.__name__, Path(tmp_path_factory.mktemp("four")), processes=4)


@pytest.mark.parametrize("name", hybrid_four_checks.CHECKS)
def test_split_models_beside_replicas(name: str, split_in_four: dict[str, str]) -> None:
    assert not split_in_four[name], split_in_four[name]
