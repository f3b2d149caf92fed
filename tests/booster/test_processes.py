"""The Booster in one, two and four processes; what two have saved, one and four go on from; killed processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from apex.checkpoint import load
from tests.booster import alone_checks, four_checks, hybrid_checks, killed, process_checks
from tests.booster.problem import assert_equal
from tests.parallel.processes import environment, run_checks
from tests.support.warm import run_python

pytest.importorskip("safetensors")
RUNS = {
    "two": (process_checks, 2),
    "one": (alone_checks, 1),
    "four": (four_checks, 4),
    "split": (hybrid_checks, 2),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Return the results of the checks of each run, which has a folder of its name."""
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
def killed_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(tmp_path_factory.mktemp("killed"))
    done = run_python("-m", killed.__name__, str(folder), cwd=folder, environment=environment(), timeout=250)
    assert not done.returncode, done.stderr
    return folder


@pytest.mark.parametrize("case", killed.KILLED)
def test_a_killed_run_resumes_bit_for_bit(case: str, killed_runs: Path) -> None:
    """After SIGKILL in a step or a save the previous checkpoint is complete, and a resumed run ends equally."""
    ends = json.loads((killed_runs / "ends.json").read_text())
    victim = killed.KILLED[case][2]
    assert ends[case] == [-signal.SIGKILL if rank == victim else 1 for rank in range(2)]
    assert ends["alive"] == ends["resumed"] == [0, 0], (killed_runs / "resumed" / "rank0.txt").read_text()
    last = max(int(path.parent.name) for path in (killed_runs / case / case).glob("*/optimizer"))
    assert last == killed.SAVED
    for step in range(1, killed.LAST + 1):
        expected, found = (content(killed_runs / run / case / str(step)) for run in ("alive", "resumed"))
        assert_equal(found, expected)


@pytest.mark.parametrize("run", ["exact alone", "exact in four"])
@pytest.mark.parametrize("plugin", killed.EXACT)
def test_another_number_of_processes_resumes_with_the_same_bits(plugin: str, run: str, killed_runs: Path) -> None:
    """Sums of these float64 numbers are not rounded, so that all results are equal."""
    ends = json.loads((killed_runs / "ends.json").read_text())
    assert ends["exact"] == [-signal.SIGKILL] * 2
    assert ends[run] == [0] * killed.RUNS[run], (killed_runs / run / "rank0.txt").read_text()
    weight, momentum = torch.zeros(4, 8, dtype=torch.float64), torch.zeros(4, 8, dtype=torch.float64)
    for step in range(killed.EXACT_LAST):
        inputs, targets = (tensor.double() for tensor in killed.exact_batch(step))
        momentum = 0.5 * momentum + 2 * (inputs @ weight.t() - targets).t() @ inputs / targets.numel()
        weight = weight - 0.25 * momentum
    found = content(killed_runs / run / plugin / str(killed.EXACT_LAST))
    assert torch.equal(found["model"]["0.weight"].double(), weight)
    assert torch.equal(found["optimizer"][0]["momentum_buffer"].double(), momentum)


def content(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint of `killed`."""
    optimizer: dict[Any, Any] = {}
    for path in sorted((folder / "optimizer").glob("*.bin")):
        optimizer |= torch.load(path)
    return {"model": torch.load(folder / "model"), "optimizer": optimizer, "scheduler": load(folder / "scheduler")}
