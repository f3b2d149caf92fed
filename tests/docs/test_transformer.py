"""The script of docs/transformer.md, in two processes and in one."""

from __future__ import annotations

from pathlib import Path

from tests.docs.test_snippets import snippets
from tests.parallel.processes import environment, launched
from tests.warm import run_together


def test_two_processes_find_what_one_does(tmp_path: Path) -> None:
    (script,) = snippets("transformer.md")
    (tmp_path / "train.py").write_text(script)
    losses = []
    for processes in (1, 2):
        with launched(processes) as numbers:
            environments = [{**environment(), **each} for each in numbers]
            runs = run_together([("train.py",)] * processes, cwd=tmp_path, environments=environments, timeout=120)
        for run in runs:
            assert run.returncode == 0, run.stderr
        (line,) = [line for line in runs[0].stdout.splitlines() if line.startswith("loss ")]
        losses.append(float(line.split()[1]))
    assert abs(losses[0] - losses[1]) < 1e-4
    assert losses[0] < 1.0  # it has learnt the two batches: a model that knows nothing has 4.6
