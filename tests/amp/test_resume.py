"""A run that is broken off and resumed in a new process, by the documented recipe, ends as one without the break."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from apex import amp
from tests.amp import resume_process
from tests.amp.common import assert_same, quiet, small_model, train
from tests.amp.resume_process import SAVED_AFTER, STEPS, cases, outcome, prepared, recipe, run
from tests.support.warm import run_python

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train every case to the end and save in the middle; then continue from there in a new process."""
    folder = tmp_path_factory.mktemp("resume")
    for case in cases():
        model, optimizer = prepared(case, seed=0)
        losses = run(case, model, optimizer, range(SAVED_AFTER))
        recipe(model, optimizer)["save"](folder / f"{case}.checkpoint", SAVED_AFTER)
        losses = run(case, model, optimizer, range(SAVED_AFTER, STEPS))
        torch.save(outcome(model, optimizer, losses), folder / f"{case}.expected")
        amp.shutdown()
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = run_python("-m", resume_process.__name__, str(folder), cwd=ROOT, environment=environment)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_equal_bits(case: Any, results: Path) -> None:
    expected, found = (torch.load(results / f"{case}.{kind}") for kind in ("expected", "result"))
    assert [value for value in found["losses"] if value < float("inf")]
    assert found["losses"] == expected["losses"]
    assert found["amp"] == expected["amp"]
    for name in ("model", "masters", "state"):
        assert all(isinstance(value, Tensor) for value in found[name])
        assert_same(found[name], expected[name])
    if case.scale == "dynamic":
        assert expected["amp"]["loss_scaler0"]["loss_scale"] != 2.0**10


@pytest.mark.parametrize("level", ["O0", "O1", "O4", "O5"])
def test_another_level_continues_from_the_same_weights(level: str, tmp_path: Path) -> None:
    model = small_model()
    model, optimizer = quiet(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), opt_level="O2")
    train(model, optimizer, 3)
    recipe(model, optimizer)["save"](tmp_path / "checkpoint", 3)
    masters = [p.detach().clone() for p in amp.master_params(optimizer)]
    amp.shutdown()
    model = small_model(seed=4)
    model, optimizer = quiet(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), opt_level=level)
    assert recipe(model, optimizer)["resume"](tmp_path / "checkpoint") == 3
    assert_same(masters, amp.master_params(optimizer))
    train(model, optimizer, 2)


def test_a_crash_while_saving_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    model, optimizer = quiet(model, torch.optim.SGD(model.parameters(), lr=0.05), opt_level="O2")
    names = recipe(model, optimizer)
    names["save"](tmp_path / "checkpoint", 1)

    def fails(checkpoint: Any, path: str) -> None:
        Path(path).write_bytes(b"half of it")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="disk full"):
        names["save"](tmp_path / "checkpoint", 2)
    assert names["resume"](tmp_path / "checkpoint") == 1
