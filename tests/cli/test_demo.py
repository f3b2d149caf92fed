"""`apex demo`: what it prints, what it draws and what it refuses."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from apex._cli.app import app
from apex._cli.demo.training import Language, Settings
from apex.ops import _library

from .helpers import run_python, words

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_table_and_plot(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--steps", "2", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    for part in ("apex FusedLayerNorm", "torch LayerNorm", "parameters", "tokens/s", "time per step"):
        assert part in result.stdout
    assert f"plot: {tmp_path / 'apex-demo.png'}" in result.stdout
    assert (tmp_path / "apex-demo.png").read_bytes().startswith(PNG_SIGNATURE)


def test_both_runs_learn_and_agree(tmp_path: Path) -> None:
    arguments = ["demo", "--steps", "30", "--device", "cpu", "--json", "--plot", "curves.png"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    outcome = json.loads(result.stdout)
    assert outcome["plot"] == str(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG_SIGNATURE)
    fused, plain = outcome["runs"]
    for run in (fused, plain):
        assert run["steps"] == len(run["losses"]) == 30
        assert all(math.isfinite(loss) for loss in run["losses"])
        assert outcome["lowest_loss"] < run["final_loss"] < 0.9 * run["first_loss"]
    torch.testing.assert_close(torch.tensor(fused["losses"]), torch.tensor(plain["losses"]), rtol=1e-2, atol=0)


def test_without_matplotlib_the_table_still_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    result = CliRunner().invoke(app, ["demo", "--steps", "1", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "torch LayerNorm" in result.stdout
    assert "pip install matplotlib" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps"),
        (["--steps", "many"], "--steps"),
        (["--device", "toaster"], "available here: cpu"),
        (["--device", "cuda:99"], "there is no device 'cuda:99'"),
        (["--device", "meta"], "there is no device 'meta'"),
        (["--plot", "missing/curves.png"], "does not exist"),
        (["--plot", "curves.txt"], "does not end in one of"),
        (["--plot", "."], "does not end in one of"),
    ],
)
def test_bad_options(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert message in words(result.output)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu_says_so_and_why() -> None:
    result = CliRunner().invoke(app, ["demo", "--device", "cuda"])
    assert result.exit_code == 2
    assert "available here: cpu" in words(result.output)


def test_an_implementation_that_cannot_be_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with _library.implementation("triton"):
        result = CliRunner().invoke(app, ["demo", "--device", "cpu", "--steps", "1"])
    assert result.exit_code == 2
    assert "APEX_IMPL=triton was asked for" in words(result.output)


def test_pipes_get_plain_text(tmp_path: Path) -> None:
    result = run_python("-m", "apex", "demo", "--steps", "2", "--device", "cpu", cwd=tmp_path, FORCE_COLOR="1")
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout + result.stderr
    assert str(tmp_path / "apex-demo.png") in result.stdout


def test_the_language_is_reproducible_and_its_lowest_loss_is_an_entropy() -> None:
    settings = Settings(steps=1)
    assert torch.equal(next(Language(settings).batches()), next(Language(settings).batches()))
    assert 0 < Language(settings).lowest_loss() < math.log(settings.alphabet)
