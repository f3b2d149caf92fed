"""Checkpoints of split models, loaded by other splits, and resumed after a rank was killed."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from apex.checkpoint import latest
from tests.parallel.processes import environment, run_checks
from tests.support.warm import run_python

from . import checkpoint_alone_checks, checkpoint_checks, killed
from .small_gpt import whole

# Seconds for all runs to start and to stop. Ranks that nobody stops give up after 40.
PATIENCE = 240


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = Path(tmp_path_factory.mktemp("checkpoint"))
    in_four = run_checks(checkpoint_checks.__name__, folder, processes=4, timeout=300)
    (folder / "alone").mkdir()
    return in_four | run_checks(checkpoint_alone_checks.__name__, folder / "alone", processes=1)


@pytest.mark.parametrize("name", [*checkpoint_checks.CHECKS, *checkpoint_alone_checks.CHECKS])
def test_processes(name: str, found: dict[str, str]) -> None:
    assert not found[name], found[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(tmp_path_factory.mktemp("killed"))
    done = run_python("-m", killed.__name__, str(folder), cwd=folder, environment=environment(), timeout=PATIENCE)
    assert not done.returncode, done.stderr
    return folder


@pytest.mark.parametrize("phase", killed.VICTIMS)
def test_a_killed_rank_ends_all_and_loses_nothing(phase: str, runs: Path) -> None:
    victim = killed.VICTIMS[phase]
    expected = [-signal.SIGKILL if rank == victim else 1 for rank in range(killed.RANKS)]
    assert json.loads((runs / "ends.json").read_text())[phase] == expected
    for rank in range(killed.RANKS):
        if rank != victim:
            assert (
                "start all processes again from the last checkpoint" in (runs / phase / f"rank{rank}.txt").read_text()
            )
    path = latest(runs / phase / "checkpoints")
    assert path is not None
    assert path.name == "step-00000001"
    assert_same(path, runs / "alive" / "checkpoints" / path.name)


@pytest.mark.parametrize("name", killed.EXCHANGES)
def test_the_exchange_of_a_killed_rank_is_named(name: str, runs: Path) -> None:
    assert json.loads((runs / "ends.json").read_text())[name] == [1, -signal.SIGKILL]
    said = (runs / name / "rank0.txt").read_text()
    assert f"rank 0 of 2: {killed.EXCHANGES[name]}" in said
    assert "no failure is reported by rank 1" in said


def test_a_resumed_run_equals_an_uninterrupted_run(runs: Path) -> None:
    ends = json.loads((runs / "ends.json").read_text())
    assert ends["alive"] == ends["resumed"] == [0] * killed.RANKS, (runs / "resumed" / "rank0.txt").read_text()
    assert_same(*(runs / name / "checkpoints" / "step-00000003" for name in ("alive", "resumed")))


def assert_same(path: Path, other: Path) -> None:
    """Assert that all tensors are bitwise equal."""
    expected = whole(other)
    for key, value in whole(path).items():
        assert torch.equal(value, expected[key]), key
