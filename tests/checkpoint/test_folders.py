"""Checkpoint folders: read as of one moment, and replaced without loss of the user's files."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apex import checkpoint
from apex._atomic import temporary_beside
from apex.checkpoint import _folders
from apex.checkpoint._folders import Generation
from apex.optimizers import FusedAdam

NEEDED = "__0_0.distcp"


def save(path: Path, value: float = 1.0) -> None:
    checkpoint.save_sharded({"weights": torch.full((3,), value)}, path)


def value_of(path: Path) -> float:
    state = {"weights": torch.zeros(3)}
    checkpoint.load_sharded(state, path)
    assert (state["weights"] == state["weights"][0]).all()
    return state["weights"][0].item()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_that_is_no_checkpoint_stays(tmp_path: Path) -> None:
    path = tmp_path / "thesis"
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"thesis holds files and is no checkpoint \(it has no manifest\.json\)"):
        save(path)
    assert (path / "thesis.tex").read_text() == "years of work"
    (path / "thesis.tex").unlink()
    (path / "manifest.json").write_text(json.dumps({"name": "an app", "icons": []}))  # of a web page
    with pytest.raises(FileExistsError, match="no checkpoint"):
        save(path)
    assert names(tmp_path) == ["thesis"]
    (path / "manifest.json").unlink()
    save(path)
    assert value_of(path) == 1.0


def test_foreign_files_of_a_checkpoint_stay(tmp_path: Path) -> None:
    """Files, folders, links and unreadable manifests stay unchanged."""
    path = tmp_path / "checkpoint"
    save(path)
    (path / "notes.txt").write_text("mine")
    (path / "logs").mkdir()
    (path / "logs" / "one").write_text("log")
    (path / "dangling").symlink_to("nowhere")
    (path / "up").symlink_to("..", target_is_directory=True)
    before = os.stat(path / "notes.txt")
    save(path, 2.0)
    assert value_of(path) == 2.0
    assert (path / "notes.txt").read_text() == "mine"
    assert os.stat(path / "notes.txt").st_mtime_ns == before.st_mtime_ns
    assert (path / "logs" / "one").read_text() == "log"
    assert (os.readlink(path / "dangling"), os.readlink(path / "up")) == ("nowhere", "..")
    assert set(json.loads((path / "manifest.json").read_text())) == {".metadata", NEEDED}
    assert names(tmp_path) == ["checkpoint"]


def test_a_foreign_file_under_a_needed_name(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "manifest.json").write_text("{}")
    (path / NEEDED).write_text("mine")
    with pytest.raises(FileExistsError, match=rf"{NEEDED} was not written by a save to this folder") as failure:
        save(path)
    assert failure.value.errno == errno.EEXIST
    assert (path / NEEDED).read_text() == "mine"
    assert names(tmp_path) == ["checkpoint"]


def test_files_that_users_write_during_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint"
    save(path)
    (path / "log").write_text("a")
    (path / "logs").mkdir()
    exchange = _folders._exchange

    def exchanged(temporary: Path, target: Path) -> None:
        with open(path / "log", "a") as file:
            file.write("b")
        (path / "new").write_text("c")
        (path / "logs" / "new").write_text("d")
        exchange(temporary, target)

    monkeypatch.setattr(_folders, "_exchange", exchanged)
    save(path, 2.0)
    assert value_of(path) == 2.0
    assert [(path / name).read_text() for name in ("log", "new", "logs/new")] == ["ab", "c", "d"]
    assert names(tmp_path) == ["checkpoint"]


def test_a_kill_between_the_renames_loses_nobodys_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint"
    save(path)
    (path / "notes").write_text("mine")
    monkeypatch.setattr(_folders, "discard", lambda *_: None)  # killed before it
    save(path, 2.0)
    monkeypatch.undo()
    assert names(tmp_path) == [".checkpoint.replaced", "checkpoint"]
    (tmp_path / ".checkpoint.replaced" / "late").write_text("too")
    save(path, 3.0)
    assert names(tmp_path) == ["checkpoint"]
    assert names(path) == [".metadata", NEEDED, "late", "manifest.json", "notes"]
    assert value_of(path) == 3.0


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    left, other = temporary_beside(path), temporary_beside(tmp_path / "other")
    for folder in (left, other):
        folder.mkdir()
        (folder / NEEDED).write_text("unfinished")
    save(path)
    assert names(tmp_path) == sorted([other.name, "checkpoint"])


def test_a_series_removes_only_its_own_files(tmp_path: Path) -> None:
    series = checkpoint.Series(tmp_path, keep=1, sharded=True)
    (tmp_path / "step-00000000").mkdir()
    (tmp_path / "step-00000000" / "thesis.tex").write_text("years of work")
    for step in (1, 2, 3):
        path = series.save({"weights": torch.ones(2)}, step)
        (path / "notes").write_text(f"of step {step}")
    series.save({"weights": torch.ones(2)}, 4)
    assert names(tmp_path) == [f"step-0000000{step}" for step in range(5)]
    assert names(tmp_path / "step-00000000") == ["thesis.tex"]
    assert [names(tmp_path / f"step-0000000{step}") for step in (1, 2, 3)] == [["notes"]] * 3
    assert series.latest() == series.path_of(4)


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
def test_permissions_are_kept(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint"
    save(path)
    path.chmod(mode)
    for each in path.iterdir():
        each.chmod(0o600)
    seen: list[int] = []
    monkeypatch.setattr(
        _folders, "check_names", lambda *_: seen.extend(each.stat().st_mode for each in tmp_path.glob(".*.tmp"))
    )
    save(path)
    assert [stat.S_IMODE(each) for each in seen] == [0o700]
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert {stat.S_IMODE(each.stat().st_mode) for each in path.iterdir()} == {0o600}


def test_a_reader_keeps_its_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save(path)
    with Generation(path) as before:
        content = (path / NEEDED).read_bytes()
        save(path, 2.0)
        before.check()
        with before.reading(NEEDED) as file:
            assert file.read() == content


def test_more_files_than_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other files are opened when they are read, from this folder or not at all."""
    path = tmp_path / "checkpoint"
    save(path)
    monkeypatch.setattr(_folders, "_MAX_OPEN_FILES", 1)
    with Generation(path) as before:
        before.check()
        save(path, 2.0)
        with pytest.raises(RuntimeError, match="was replaced while it was read; load it again"):
            before.check()
    assert value_of(path) == 2.0


def test_readers_while_a_thread_saves(tmp_path: Path) -> None:
    """Every reader finds a complete checkpoint of one save."""
    path = tmp_path / "checkpoint"
    save(path, 0.0)
    done = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not done.is_set():
                with Generation(path) as generation:
                    generation.check()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(12):
            save(path, float(number))
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not failures


def test_values_that_are_refused_change_no_tensor(tmp_path: Path) -> None:
    """All processes refuse before any of them changes a tensor."""
    path = tmp_path / "checkpoint"
    checkpoint.save_sharded({"a": torch.ones(3), "other": a_fraction(), "z": torch.ones(3)}, path)
    state = {"a": torch.zeros(3), "other": 0, "z": torch.zeros(3)}
    with pytest.raises(RuntimeError, match="Fraction"):
        checkpoint.load_sharded(state, path)
    assert not state["a"].any()
    assert not state["z"].any()


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, FusedAdam])
def test_optimizers_that_have_no_state_yet_are_refused(kind: Any, as_dict: bool, tmp_path: Path) -> None:
    """PyTorch reads the entries of the state that it is given: a new optimizer would lose its moments in silence."""

    def made(lr: float, steps: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(steps)
        model = nn.Linear(3, 2)
        optimizer = kind(model.parameters(), lr=lr)
        for _ in range(steps):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return model, optimizer

    def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
        if as_dict:
            return {"model": model.state_dict(), "run": {"optimizer": optimizer.state_dict()}}
        return {"model": model.state_dict(), "optimizer": optimizer}

    path, (model, optimizer) = tmp_path / "checkpoint", made(0.1, 2)
    checkpoint.save_sharded({**state_of(model, optimizer), "step": 2}, path)
    other, new = made(0.5, 0)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"optimizer' has taken no step.*get_optimizer_state_dict"):
        checkpoint.load_sharded(state_of(other, new), path)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    assert new.param_groups[0]["lr"] == 0.5
    checkpoint.load_sharded({"model": other.state_dict(), "step": 0}, path)  # without an optimizer
    assert torch.equal(other.weight, model.weight)
    third, stepped = made(0.5, 1)
    state = state_of(third, stepped)
    checkpoint.load_sharded(state, path)
    if as_dict:
        stepped.load_state_dict(state["run"]["optimizer"])
    assert torch.equal(stepped.state[third.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def a_fraction() -> object:
    """Return an object that can be pickled but not loaded with `weights_only`."""
    from fractions import Fraction

    return Fraction(1, 3)
