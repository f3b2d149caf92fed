"""Runs the one script of a page of the documentation."""

from __future__ import annotations

from pathlib import Path

from tests.docs.test_snippets import snippets
from tests.parallel.processes import environment, launched
from tests.support.warm import run_together


def printed_losses(page: str, processes: int, folder: Path) -> list[list[float]]:
    """What each of some connected processes that run the script printed as `loss NUMBER`."""
    (script,) = snippets(page)
    (folder / "train.py").write_text(script)
    with launched(processes) as numbers:
        environments = [{**environment(), **each} for each in numbers]
        runs = run_together([("train.py",)] * processes, cwd=folder, environments=environments, timeout=120)
    for run in runs:
        assert run.returncode == 0, run.stderr
    return [[float(line.split()[1]) for line in run.stdout.splitlines() if line.startswith("loss ")] for run in runs]
