"""Checkpoints in one process: contents, retention and detection of damage."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import resource
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from apex import _atomic, checkpoint
from apex.booster import Booster
from tests.campaign.trials import in_child
from tests.support.drawn import given, settings, st


def state_of(step: int) -> dict[str, object]:
    return {"step": step, "weights": torch.arange(5.0) * step, "names": ["a", ("b", None)]}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "checkpoint.pt"
    checkpoint.save(state_of(3), path)
    found = checkpoint.load(path, map_location="cpu")
    assert found.pop("weights").tolist() == [0.0, 3.0, 6.0, 9.0, 12.0]
    assert found == {"step": 3, "names": ["a", ("b", None)]}
    assert names(path.parent) == ["checkpoint.pt"]
    # Readable by others, as any file that a program writes.
    (tmp_path / "plain").write_text("")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_failed_save_closes_its_file(tmp_path: Path) -> None:
    """A removed file that a process holds open still fills the disk."""

    def save() -> str:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        gc.disable()  # errors that are part of cycles stay
        with contextlib.suppress(OSError):
            checkpoint.save({"weights": torch.zeros(100_000)}, tmp_path / "large.pt")
            return "no error"
        links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        return "".join(link for link in links if "large" in link)

    assert in_child(save) == ""
    assert names(tmp_path) == []


def test_files_folders_and_links_are_told_apart(tmp_path: Path) -> None:
    file, folder, link = tmp_path / "file.pt", tmp_path / "folder", tmp_path / "link"
    checkpoint.save(state_of(1), file)
    checkpoint.save_sharded({"weights": torch.ones(3)}, folder)
    link.symlink_to(folder)
    state = {"weights": torch.zeros(3)}
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*file\.pt, but a file of this name"):
        checkpoint.load_sharded(state, file)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*folder, but a folder of this name"):
        checkpoint.load(folder)
    for path, kind in ((file, "a file"), (link, "a link")):
        with pytest.raises(FileExistsError, match=f"{path.name} is {kind}, which no folder can replace"):
            checkpoint.save_sharded(state, path)
    checkpoint.load_sharded(state, link)
    assert state["weights"].tolist() == [1.0] * 3
    assert names(tmp_path) == ["file.pt", "folder", "link"]


def test_a_checkpoint_of_the_booster_is_not_called_damaged(tmp_path: Path) -> None:
    booster = Booster("cpu")
    model, *_ = booster.boost(torch.nn.Linear(2, 2))
    path = booster.save_training(checkpoint.Series(tmp_path, sharded=True), 1, model)
    with pytest.raises(ValueError, match=r"step-00000001 is no checkpoint of save_sharded: .* the Booster's are"):
        checkpoint.load_sharded({"weights": torch.ones(3)}, path)


@pytest.mark.parametrize(
    ("saved", "own", "fits"),
    [
        (torch.float32, torch.int64, False),
        (torch.complex64, torch.float32, False),
        (torch.int64, torch.bool, False),
        (torch.float32, torch.bfloat16, True),
        (torch.int32, torch.float64, True),
    ],
)
def test_tensors_are_not_cut_off_by_another_kind_of_dtype(
    saved: torch.dtype, own: torch.dtype, fits: bool, tmp_path: Path
) -> None:
    checkpoint.save_sharded({"first": torch.ones(2), "model": {"weights": torch.full((3,), 2, dtype=saved)}}, tmp_path)
    state: dict[str, Any] = {"first": torch.zeros(2), "model": {"weights": torch.zeros(3, dtype=own)}}
    if fits:
        checkpoint.load_sharded(state, tmp_path)
        assert state["model"]["weights"].tolist() == [2] * 3
    else:
        with pytest.raises(RuntimeError, match=rf"model\.weights is {saved} in it, which {own} cannot hold"):
            checkpoint.load_sharded(state, tmp_path)
        assert not state["first"].any()


def test_a_series_keeps_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    series = checkpoint.Series("run")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    series.save(state_of(1), 1)
    assert names(tmp_path / "run") == ["step-00000001.pt"]
    assert series.latest() == tmp_path / "run" / "step-00000001.pt"


def test_the_name_of_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"writes the format of torch\.save"):
        checkpoint.save({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_checksums_that_are_switched_off(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        checkpoint.save(state_of(1), tmp_path / "x.pt")
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert checkpoint.load(tmp_path / "x.pt")["step"] == 1


def test_files_of_torch_before_1_6(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save(state_of(3), path, _use_new_zipfile_serialization=False)
    found = checkpoint.load(path)
    assert found.pop("weights").tolist() == [0.0, 3.0, 6.0, 9.0, 12.0]
    assert found == {"step": 3, "names": ["a", ("b", None)]}
    with pytest.raises(ValueError, match=r"before PyTorch 1\.6, which has no checksums"):
        checkpoint.verify(path)
    content = path.read_bytes()
    for size in (20, len(content) // 2, len(content) - 3):
        path.write_bytes(content[:size])
        with pytest.raises((checkpoint.DamagedCheckpoint, pickle.UnpicklingError)):
            checkpoint.load(path)
    torch.save({"step": Path("x")}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(pickle.UnpicklingError):
        checkpoint.load(path)


def test_a_save_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(state_of(1), path)
    with pytest.raises(RuntimeError, match=r"could not be written; rank 0 had .*local object"):
        checkpoint.save({"weights": torch.ones(10), "function": lambda: None}, path)
    assert checkpoint.load(path)["step"] == 1
    assert names(tmp_path) == ["checkpoint.pt"]
    with pytest.raises(RuntimeError, match=r"could not be written; rank 0 had .*local object"):
        checkpoint.save({"function": lambda: None}, path, wait=True)


@settings(max_examples=40, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_damage_is_noticed(where: float, bit: int, cut: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The file was cut, or one bit of a tensor was flipped."""
    path = tmp_path_factory.mktemp("damage") / "checkpoint.pt"
    weights = torch.rand(5000)
    checkpoint.save({"weights": weights}, path)
    content = bytearray(path.read_bytes())
    start = bytes(content).index(weights.numpy().tobytes())
    if cut:
        content = content[: int(where * len(content))]
    else:
        content[start + int(where * weights.nbytes)] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(checkpoint.DamagedCheckpoint, match=r"checkpoint\.pt is damaged"):
        checkpoint.load(path)


def test_damage_around_the_tensors_is_noticed(tmp_path: Path) -> None:
    """Names, lengths, flags and versions in the archive: a damaged file that passes still loads the same values."""
    series = checkpoint.Series(tmp_path)
    weights = torch.rand(4)
    series.save({"weights": weights}, 1)
    path = series.save({"weights": weights}, 2)
    content, noticed = path.read_bytes(), 0
    for where in range(0, len(content), 5):
        path.write_bytes(content[:where] + bytes([content[where] ^ 0x81]) + content[where + 1 :])
        found = checkpoint.latest(tmp_path)
        noticed += found == series.path_of(1)
        assert found is not None
        assert torch.equal(torch.load(found)["weights"], weights)
    assert noticed > 50


def test_new_folders_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a crash of the machine would remove them with their contents."""
    flushed: list[Path] = []
    monkeypatch.setattr(_atomic, "sync_folder", flushed.append)
    checkpoint.save({}, tmp_path / "a" / "b" / "x.pt")
    assert set(flushed) == {tmp_path, tmp_path / "a", tmp_path / "a" / "b"}


@pytest.mark.parametrize("sharded", [False, True])
def test_bytes_are_on_the_disk_before_their_name_and_the_name_before_save_returns(
    sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a machine that stops could leave an empty file under the name of a checkpoint."""
    flushed: dict[int, int] = {}  # by inode: the size at the last flush
    unflushed: list[str] = []
    renames: list[Path] = []
    fsync = os.fsync

    def note_flush(descriptor: int) -> None:
        fsync(descriptor)
        found = os.fstat(descriptor)
        flushed[found.st_ino] = found.st_size

    def checking(rename: Any) -> Any:
        def check(source: Any, target: Any, *rest: Any) -> None:
            source = Path(source)
            renames.append(Path(target))
            for path in [source, *(source.rglob("*") if source.is_dir() else ())]:
                # PyTorch renames this file inside of the unfinished folder; it is flushed under its later name.
                is_theirs = path.name == ".metadata.tmp"
                if not is_theirs and flushed.get(path.stat().st_ino, -1) != path.stat().st_size:
                    unflushed.append(str(path))
            flushed.pop(Path(target).parent.stat().st_ino, None)
            rename(source, target, *rest)

        return check

    monkeypatch.setattr(os, "fsync", note_flush)
    for name in ("replace", "rename"):
        monkeypatch.setattr(os, name, checking(getattr(os, name)))
    save = checkpoint.save_sharded if sharded else checkpoint.save
    for step in (1, 2):
        save(state_of(step), tmp_path / "checkpoint")
        assert tmp_path / "checkpoint" in renames
        assert not unflushed
        assert tmp_path.stat().st_ino in flushed


def test_one_process_is_not_warned_that_it_is_alone(tmp_path: Path) -> None:
    state = {"weights": torch.ones(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.save_sharded(state, tmp_path / "checkpoint")
        checkpoint.load_sharded(state, tmp_path / "checkpoint")


def test_missing_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*nothing\.pt"):
        checkpoint.load(tmp_path / "nothing.pt")
    assert checkpoint.latest(tmp_path / "nowhere") is None
    assert checkpoint.Series(tmp_path).load() is None


@pytest.mark.parametrize("sharded", [False, True])
def test_series(tmp_path: Path, sharded: bool) -> None:
    series = checkpoint.Series(tmp_path / "run", keep=2, sharded=sharded)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    _atomic.temporary_beside(tmp_path / "run" / "step-00000001.pt").write_text("of a process that is gone")
    _atomic.temporary_beside(tmp_path / "run" / "step-00000001").mkdir()
    ending = "" if sharded else ".pt"
    for step in (1, 2, 10):
        assert series.save({"weights": torch.full((3,), float(step))}, step) == series.path_of(step)
    assert names(tmp_path / "run") == ["notes.txt", f"step-00000002{ending}", f"step-00000010{ending}"]
    newest = series.path_of(10)
    assert series.latest() == checkpoint.latest(tmp_path / "run") == newest

    def value(path: Path | None) -> float:
        assert path is not None
        if not sharded:
            return checkpoint.load(path)["weights"][0].item()
        state = {"weights": torch.zeros(3)}
        checkpoint.load_sharded(state, path)
        return state["weights"][0].item()

    assert value(series.latest()) == 10
    series.save({"weights": torch.full((3,), 11.0)}, 10)  # once more
    assert value(series.latest()) == 11
    damaged = newest / "__0_0.distcp" if sharded else newest
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert series.latest() == series.path_of(2)
    # Checkpoints before the damaged one are kept, whatever their step.
    series.save({"weights": torch.full((3,), 3.0)}, 3)
    assert names(tmp_path / "run")[1:] == [f"step-0000000{n}{ending}" for n in (2, 3)] + [f"step-00000010{ending}"]
    assert value(series.latest()) == 3


def test_a_series_does_not_touch_other_files(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()  # not a name of ours
    under_way = tmp_path / ".step-00000009.pt.00000000-0123456789abcdef.tmp"
    under_way.write_text("of another machine")
    files, folders = (checkpoint.Series(tmp_path, keep=1, sharded=sharded) for sharded in (False, True))
    state = {"weights": torch.ones(2)}
    for step in (1, 2):
        files.save(state, step)
        folders.save(state, step + 2)
    assert names(tmp_path) == [under_way.name, "step-00000002.pt", "step-00000004", "step-1"]
    assert files.latest() == files.path_of(2)
    assert folders.latest() == checkpoint.latest(tmp_path) == folders.path_of(4)
    assert files.load()["weights"].tolist() == [1.0, 1.0]


def test_a_kill_while_a_sharded_checkpoint_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacement takes two renames; between them the old folder exists under another name."""
    series = checkpoint.Series(tmp_path, keep=2, sharded=True)
    path = series.save({"weights": torch.ones(2)}, 1)
    rename = os.rename

    def fail_at_the_second(error: BaseException) -> None:
        def renamed(source: Path, target: Path) -> None:
            if Path(target) == path and not path.exists():
                monkeypatch.setattr(os, "rename", rename)
                raise error
            rename(source, target)

        monkeypatch.setattr(os, "rename", renamed)

    def value() -> float:
        state = {"weights": torch.zeros(2)}
        found = series.latest()
        assert found is not None
        checkpoint.load_sharded(state, found)
        return state["weights"][0].item()

    fail_at_the_second(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        series.save({"weights": torch.full((2,), 2.0)}, 1)
    assert not path.exists()
    assert value() == 1.0
    state = {"weights": torch.zeros(2)}
    checkpoint.load_sharded(state, path)
    assert state["weights"].tolist() == [1.0, 1.0]
    series.save({"weights": torch.full((2,), 3.0)}, 3)
    assert names(tmp_path) == [path.name, "step-00000003"]
    fail_at_the_second(OSError("no space"))
    with pytest.raises(RuntimeError, match="could not be written; rank 0 had OSError: no space"):
        series.save({"weights": torch.full((2,), 2.0)}, 1)
    checkpoint.verify(path)
    fail_at_the_second(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        series.save({"weights": torch.full((2,), 2.0)}, 1)
    checkpoint.save_sharded({"weights": torch.full((2,), 4.0)}, path)
    checkpoint.load_sharded(state, path)
    assert state["weights"].tolist() == [4.0, 4.0]


def test_sharded_damage_is_noticed(tmp_path: Path) -> None:
    for damage in ("length", "checksum", "missing", "manifest", "empty"):
        path = tmp_path / damage
        state = {"weights": torch.rand(50)}
        checkpoint.save_sharded(state, path)
        part = path / "__0_0.distcp"
        content = bytearray(part.read_bytes())
        if damage == "length":
            part.write_bytes(content + b"x")
        elif damage == "checksum":
            content[len(content) // 2] ^= 1
            part.write_bytes(content)
        elif damage == "missing":
            (path / ".metadata").unlink()
        else:
            (path / "manifest.json").write_text(json.dumps([1] if damage == "manifest" else {}))
        before = state["weights"].clone()
        with pytest.raises(checkpoint.DamagedCheckpoint, match=f"{damage} is damaged"):
            checkpoint.load_sharded(state, path)
        assert torch.equal(state["weights"], before)


def test_arguments(tmp_path: Path) -> None:
    for keep in (0, True):
        with pytest.raises(ValueError, match=f"keep must be at least 1, or None to keep all checkpoints, not {keep}"):
            checkpoint.Series(tmp_path, keep=keep)
    with pytest.raises(ValueError, match="step must not be negative"):
        checkpoint.Series(tmp_path).save({}, -1)
    with pytest.raises(TypeError, match=r"step=1\.5 must be an integer"):
        checkpoint.Series(tmp_path).save({}, 1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="keep='3' must be an integer"):
        checkpoint.Series(tmp_path, keep="3")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="load_sharded"):
        checkpoint.Series(tmp_path, sharded=True).load()
