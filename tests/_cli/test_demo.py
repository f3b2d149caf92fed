"""`apex demo`: tables, JSON, plots and errors."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from apex import amp
from apex._cli.app import app
from apex._cli.demo import training
from apex._cli.demo.data import Language, Pictures
from apex._cli.demo.plot import draw
from apex._cli.demo.report import Comparison, ModelFacts, print_comparison, print_json
from apex._cli.demo.training import LEVELS, Run
from apex.ops import _library

from .helpers import run_quickly, words

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
QUICK = ["demo", "--device", "cpu", "--model", "conv"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_table_and_plot(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--steps", "1", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    for part in ("final loss", "vs fp32", "time/step", "memory", "skipped", "parameters"):
        assert part in result.stdout
    rows = [tuple(line.split()[:2]) for line in result.stdout.splitlines()]
    expected = list(itertools.product(("gpt", "conv"), LEVELS))
    assert [row for row in rows if row in expected] == expected
    assert f"plot: {tmp_path / 'apex-demo.png'}" in result.stdout
    assert (tmp_path / "apex-demo.png").read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.parametrize("model", ["gpt", "conv"])
def test_the_runs_learn_and_agree(model: str, tmp_path: Path) -> None:
    arguments = ["demo", "--model", model, "--levels", "O0,o2", "--steps", "16", "--device", "cpu", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--plot", "curves.png"])
    assert result.exit_code == 0, result.output
    outcome = json.loads(result.stdout)
    assert outcome["plot"] == str(tmp_path / "curves.png")
    plain, half = outcome["runs"]
    assert (plain["level"], half["level"]) == ("O0", "O2")
    for run in (plain, half):
        assert len(run["losses"]) == len(run["loss_scales"]) == outcome["steps"] == 16
        assert (outcome["models"][model]["lowest_loss"] or 0) < run["final_loss"] < 0.95 * run["losses"][0]
    assert plain["distance_to_fp32"] == 0
    assert half["distance_to_fp32"] == pytest.approx(half["final_loss"] - plain["final_loss"])
    assert abs(half["distance_to_fp32"]) < 0.1 * plain["final_loss"]
    assert half["peak_memory_bytes"] < plain["peak_memory_bytes"]
    assert set(plain["loss_scales"]) == {1.0}
    assert half["loss_scales"][0] == 2.0**16


def test_every_level_has_one_thread_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    step = training._Session.step
    monkeypatch.setattr(training._Session, "step", lambda *args: (seen.append(torch.get_num_threads()), step(*args))[1])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        result = CliRunner().invoke(app, [*QUICK, "--steps", "2", "--levels", "O0,O4"])
        assert result.exit_code == 0, result.output
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert "cpu, one thread" in result.stdout


def test_the_picture_shows_how_far_losses_are_from_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure))
    assert draw(make_comparison(O0=[1.0, 0.5], O2=[1.5, 0.25]), tmp_path / "a.png") is None
    assert draw(make_comparison(O2=[1.5, 0.25]), tmp_path / "b.png") is None
    panels = [next(axes for axes in figure.axes if axes.get_ylabel() == "loss minus float32") for figure in drawn]
    distances = [line.get_ydata() for line in panels[0].get_lines() if len(line.get_xdata()) == 2]
    assert [0.5, -0.25] in [list(values) for values in distances]
    assert not panels[1].get_lines()
    assert "no run in float32" in panels[1].texts[0].get_text()


def test_no_trace_of_amp_is_left() -> None:
    assert CliRunner().invoke(app, [*QUICK, "--steps", "1", "--levels", "O1"]).exit_code == 0
    assert not torch.is_autocast_enabled("cpu")
    assert amp.state_dict() == {}


def test_without_float32_there_is_no_distance() -> None:
    result = CliRunner().invoke(app, [*QUICK, "--steps", "1", "--levels", "O4"])
    assert result.exit_code == 0, result.output
    assert "n/a" in result.stdout
    assert "quickest" not in result.stdout


def test_without_matplotlib_the_table_still_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    result = CliRunner().invoke(app, [*QUICK, "--steps", "1", "--levels", "O0"])
    assert result.exit_code == 0, result.output
    assert "O0 fp32" in result.stdout
    assert "pip install matplotlib" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "rnn"], "--model"),
        (["--levels", "O0,O6"], "unknown: O6; choose from boost,O0,O1,O2,O3,O4,O5"),
        (["--levels", ","], "no opt level given"),
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
def test_without_a_gpu_the_reason_is_printed() -> None:
    result = CliRunner().invoke(app, ["demo", "--device", "cuda"])
    assert result.exit_code == 2
    assert "available here: cpu" in words(result.output)


def test_an_implementation_that_cannot_be_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with _library.implementation("triton"):
        result = CliRunner().invoke(app, [*QUICK, "--steps", "1"])
    assert result.exit_code == 2
    assert "APEX_IMPL=triton was asked for" in words(result.output)


def test_pipes_get_plain_text(tmp_path: Path) -> None:
    arguments = ("-m", "apex", *QUICK, "--steps", "2", "--levels", "O0,O5")
    result = run_quickly(*arguments, cwd=tmp_path, FORCE_COLOR="1")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "\x1b" not in result.stdout
    assert str(tmp_path / "apex-demo.png") in result.stdout


def make_comparison(**losses: list[float]) -> Comparison:
    runs = [
        Run("gpt", level, 1, values, [1.0] * len(values), [0.1 / (index + 1)] * len(values), 0, 1000)
        for index, (level, values) in enumerate(losses.items())
    ]
    return Comparison("cpu", "torch", 1, 1, "counted", {"gpt": ModelFacts("a model", None)}, runs)


def test_the_quickest_level_is_sought_among_those_as_good_as_float32() -> None:
    comparison = make_comparison(O0=[1.0], O4=[1.01], O5=[1.5], O3=[math.nan])
    quickest = comparison.quickest("gpt")
    assert quickest is not None
    assert quickest.level == "O4"


def test_a_loss_that_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    comparison = make_comparison(O0=[1.0], O3=[math.inf])
    assert comparison.failed == []
    print_json(comparison)
    run = json.loads(capsys.readouterr().out)["runs"][1]
    assert run["losses"] == [None]
    assert run["distance_to_fp32"] is None
    comparison = make_comparison(O0=[1.0], O2=[math.nan])
    assert [run.level for run in comparison.failed] == ["O2"]
    print_comparison(comparison)
    assert "a loss of O2 is not finite: run `apex doctor`" in capsys.readouterr().out


def test_the_language_is_reproducible_and_its_lowest_loss_is_an_entropy() -> None:
    language = Language(alphabet=8, context=12, batch=4, seed=1)
    sample = list(itertools.islice(language.batches(), 3))
    for (inputs, targets), (again, _) in zip(sample, language.batches(), strict=False):
        assert torch.equal(inputs, again)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert 0 < language.lowest_loss(sample) < math.log(8)


def test_pictures_are_reproducible() -> None:
    pictures, kinds = next(Pictures(kinds=4, side=8, batch=6, seed=1).batches())
    assert pictures.shape == (6, 1, 8, 8)
    assert set(kinds.tolist()) <= set(range(4))
    assert torch.equal(pictures, next(Pictures(kinds=4, side=8, batch=6, seed=1).batches())[0])
