"""`benchmarks/gpt_350m.py` on a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.parallel.processes import environment
from tests.support.warm import run_python

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpt_350m.py"


def test_both_models_train_alike() -> None:
    """The same weights and batches: losses after four steps differ by what bfloat16 rounds."""
    losses = []
    for column in ("torch", "apex"):
        command = [str(SCRIPT), "--tiny", "--child", column, "--device", "cpu", "--warmup", "4", "--steps", "1"]
        done = run_python(*command, cwd=SCRIPT.parent, environment=environment())
        assert done.returncode == 0, done.stderr
        losses.append(json.loads(done.stdout.splitlines()[-1])["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
    assert losses[0] < 4.9


def test_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import gpt_350m

    columns = {"torch.compile": {"milliseconds": 20.0}, "apex": {"milliseconds": 10.0}, "apex, graph": {"error": "?"}}
    found = gpt_350m.with_rates(columns, {"batch": 8, "sequence": 1000})
    assert found["torch.compile"] == {
        "milliseconds": 20.0,
        "tokens_per_second": 400_000,
        "times torch.compile": 1.0,
    }
    assert found["apex"]["times torch.compile"] == 2.0
    assert found["apex, graph"] == {"error": "?"}


def test_figures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With columns that only pretend to train."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import gpt_350m

    class Column:
        runs = True

        def __init__(self, name: str, model: str, arguments: Any) -> None:
            self.figures, self.rounds = {"loss": 1.0, "milliseconds": 20.0 if name == "torch.compile" else 16.0}, []

        def listen(self, deadline: float) -> None: ...
        def run_round(self, deadline: float, what: str = "") -> None: ...
        def end(self) -> None: ...

    monkeypatch.setattr(gpt_350m.steps, "Column", Column)
    output = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["gpt_350m.py", "--tiny", "--device", "cpu", "--output", str(output)])
    gpt_350m.main()
    found = json.loads(output.read_text())["columns"]
    assert list(found) == list(gpt_350m.COLUMNS)
    assert found["apex, graph"]["times torch.compile"] == 1.25
