"""`benchmarks/steps.py` on tiny models."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from apex import amp

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("steps")


@pytest.mark.parametrize("model", ["gpt2-small", "gpt-6x384-logits", "llama", "resnet50", "unet"])
def test_ours_trains_as_torch_does(steps: ModuleType, model: str) -> None:
    """The fused modules have the same weights and give the same loss, which falls."""
    losses = {}
    for column in ("torch.amp", "O5"):
        step, batches = steps.prepare(column, model, "cpu", tiny=True)
        losses[column] = [float(step(*batches[0])) for _ in range(3)]
        amp.shutdown()
    assert losses["O5"][0] == pytest.approx(losses["torch.amp"][0], rel=0.01)
    assert min(losses["O5"][1:]) < losses["O5"][0]


def test_a_compiled_step(steps: ModuleType) -> None:
    torch._dynamo.reset()
    losses = []
    for column in ("O5+compile+graph", "O5"):
        step, batches = steps.prepare(column, "llama", "cpu", tiny=True)
        losses.append([float(step(*batch)) for batch in batches[:2]])
        amp.shutdown()
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


# What a column's process says: when it is warm, and after every round. One fails, one never says anything, nor does the
# process that it started, which has the same pipe.
PROCESS = """
import json, subprocess, sys, time
column = sys.argv[sys.argv.index("--child") + 1]
if column == "O5+graph":
    raise SystemExit("no graph here")
if column == "O5+compile":
    subprocess.run([sys.executable, "-S", "-c", "import time; time.sleep(20); open('waited', 'w')"], cwd=sys.path[0])
print(json.dumps({"loss": 1.5}), flush=True)
for number, _ in enumerate(sys.stdin):
    print(json.dumps({"milliseconds": 10.0 * number, "mebibytes": 7}), flush=True)
"""


def run(steps: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, Any]:
    script, output = tmp_path / "column.py", tmp_path / "steps.json"
    script.write_text(PROCESS)
    monkeypatch.setattr(steps, "__file__", str(script))
    command = ["steps.py", "--device", "cpu", "--models", "gpt-6x384", "--output", str(output), *options]
    monkeypatch.setattr(sys, "argv", command)
    steps.main()
    return json.loads(output.read_text())["models"]


def test_the_result_file(
    steps: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It keeps other models, has the median of the rounds that columns took in turns, and says what failed."""
    (tmp_path / "steps.json").write_text(json.dumps({"models": {"another": {"columns": {}}}}))
    models = run(
        steps, tmp_path, monkeypatch, "--rounds", "2", "--at-once", "2", "--columns", "compile", "O5", "O5+graph"
    )
    assert set(models) == {"another", "gpt-6x384"}
    columns = models["gpt-6x384"]["columns"]
    assert columns["O5"] == {"loss": 1.5, "milliseconds": 5.0, "mebibytes": 7, "rounds": [0.0, 10.0]}
    assert "no graph here" in columns["O5+graph"]["error"]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["O5", "5.00", "0.00", "10.00", "1.00", "7", "1.00", "1.5000"] in lines


def test_a_limit(steps: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column that is not warm in time is named in the result file, and others are not started."""
    models = run(steps, tmp_path, monkeypatch, "--limit", "1", "--columns", "O5+compile", "O5")
    assert not (tmp_path / "waited").exists()  # by the process that it started, which is ended with it
    assert models["gpt-6x384"]["columns"] == {"O5+compile": {"error": "out of time"}}


def test_a_slow_column_costs_its_model_nothing_else(
    steps: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are measured, and so is the next model, whose columns were stopped while those of the first ran."""
    options = ("--warm-limit", "1.5", "--at-once", "5", "--rounds", "1", "--columns", "O5", "O5+compile", "O5+graph")
    models = run(
        steps, tmp_path, monkeypatch, *options, "--models", "gpt-6x384", "llama", "--without", "llama:O5+graph"
    )
    assert list(models["llama"]["columns"]) == ["O5", "O5+compile"]
    for model in ("gpt-6x384", "llama"):
        assert models[model]["columns"]["O5"]["rounds"] == [0.0]
        assert models[model]["columns"]["O5+compile"] == {"error": "out of time"}
