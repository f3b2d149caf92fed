"""The script of docs/pipelines.md, in one process and in two."""

from __future__ import annotations

from pathlib import Path

from tests.docs.test_snippets import snippets
from tests.parallel.processes import environment, launched
from tests.warm import run_together


def test_two_processes_print_what_one_does(tmp_path: Path) -> None:
    (script,) = snippets("pipelines.md")
    (tmp_path / "train.py").write_text(script)
    losses = []
    for processes in (1, 2):
        with launched(processes) as numbers:
            environments = [{**environment(), **each} for each in numbers]
            runs = run_together([("train.py",)] * processes, cwd=tmp_path, environments=environments, timeout=120)
        for run in runs:
            assert run.returncode == 0, run.stderr
        losses.append([line for line in runs[-1].stdout.splitlines() if line.startswith("loss ")])
    assert losses[0] == losses[1]
    assert float(losses[0][-1].split()[1]) < float(losses[0][0].split()[1])
