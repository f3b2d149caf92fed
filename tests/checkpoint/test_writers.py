"""Several writers at once, in threads and processes; planted links; permissions; full disks."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from apex import _atomic, checkpoint
from apex._atomic import atomic_file, replacing, temporary_beside, unfinished_folder
from apex.checkpoint import _files, _series
from tests.support.forks import fork


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(number)` in threads that start together, and raise the first error."""
    failures: list[BaseException] = []
    together = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            together.wait()
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def weights_of(path: Path, sharded: bool) -> torch.Tensor:
    if not sharded:
        return checkpoint.load(path)["weights"]
    state = {"weights": torch.zeros(2000)}
    checkpoint.load_sharded(state, path)
    return state["weights"]


@pytest.mark.parametrize(("sharded", "saves"), [(False, 20), (True, 6)])
def test_threads_that_save_to_one_path(sharded: bool, saves: int, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save: Callable[[Any, Path], None] = checkpoint.save_sharded if sharded else checkpoint.save

    def work(number: int) -> None:
        for _ in range(saves):
            save({"weights": torch.full((2000,), float(number))}, path)

    in_threads(3, work)
    found = weights_of(path, sharded)
    assert found[0] in (0, 1, 2)
    assert (found == found[0]).all()
    assert names(tmp_path) == ["checkpoint"]


@pytest.mark.parametrize(("sharded", "saves"), [(False, 15), (True, 5)])
def test_threads_that_save_to_one_series(sharded: bool, saves: int, tmp_path: Path) -> None:
    """Each thread saves its own steps, and one step that all of them write repeatedly."""
    series = checkpoint.Series(tmp_path, keep=None, sharded=sharded)

    def work(number: int) -> None:
        for index in range(saves):
            step = 3 * index + number + 1
            series.save({"weights": torch.full((2000,), float(step))}, step)
            series.save({"weights": torch.zeros(2000)}, 0)

    in_threads(3, work)
    expected = list(range(3 * saves + 1))
    assert names(tmp_path) == [series.path_of(step).name for step in expected]
    for step in expected:
        assert (weights_of(series.path_of(step), sharded) == step).all()


def test_several_threads_remove_old_checkpoints(tmp_path: Path) -> None:
    series = checkpoint.Series(tmp_path, keep=2, sharded=True)
    in_threads(3, lambda number: [series.save({"weights": torch.ones(2)}, 3 * i + number) for i in range(4)] and None)
    found = names(tmp_path)
    assert found[-1] == "step-00000011"
    assert all(name.startswith("step-") for name in found)
    for name in found:
        checkpoint.verify(tmp_path / name)


def test_a_checkpoint_may_vanish_while_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_user_files = _series.has_user_files

    def has_files_after_another_thread(path: Path) -> bool:
        shutil.rmtree(path)
        return has_user_files(path)

    series = checkpoint.Series(tmp_path, keep=1, sharded=True)
    series.save({"weights": torch.ones(2)}, 1)
    monkeypatch.setattr(_series, "has_user_files", has_files_after_another_thread)
    series.save({"weights": torch.ones(2)}, 2)
    assert names(tmp_path) == ["step-00000002"]


def test_threads_with_checksums_switched_off(tmp_path: Path) -> None:
    """Checksums are enabled for each save, and disabled again when no other thread is saving."""

    def work(number: int) -> None:
        torch.serialization.set_crc32_options(False)
        for index in range(10):
            checkpoint.save({"weights": torch.ones(2000)}, tmp_path / f"{number}-{index}.pt")

    torch.serialization.set_crc32_options(False)
    try:
        in_threads(3, work)
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    for name in names(tmp_path):
        checkpoint.verify(tmp_path / name)


def test_checksums_stay_on_while_a_thread_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to PyTorch 2.10 the switch is shared by all threads, and a save may end during another."""
    on = [False]
    monkeypatch.setattr(torch.serialization, "get_crc32_options", lambda: on[0])
    monkeypatch.setattr(torch.serialization, "set_crc32_options", lambda value: on.__setitem__(0, value))
    begun, ended, seen = threading.Event(), threading.Event(), []

    def first() -> None:
        with _files._with_checksums():
            begun.set()
            ended.wait(0.2)  # the other thread cannot begin before, unless it saves with what this one switched on
        ended.set()

    def second() -> None:
        begun.wait()
        with _files._with_checksums():
            ended.wait()
            seen.append(on[0])

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True]
    assert not on[0]


def test_files_being_written_are_not_removed(tmp_path: Path) -> None:
    """Files being written in this or another process stay.

    A killed process's are removed, another machine's after a day.
    """
    left = temporary_beside(tmp_path / "x.json")
    left.write_text("of a process that is gone")
    elsewhere = [tmp_path / f".x.json.{host:08x}-0123456789abcdef.tmp" for host in (0, 1)]
    for path in elsewhere:
        path.write_text("of another machine")
    yesterday = time.time() - 25 * 3600
    os.utime(elsewhere[1], (yesterday, yesterday))
    with replacing(tmp_path / "x.json") as under_way:
        under_way.write_text("[1]")
        with atomic_file(tmp_path / "x.json", "w") as file:
            file.write("{}")
        assert names(tmp_path) == sorted([elsewhere[0].name, under_way.name, "x.json"])
    assert (tmp_path / "x.json").read_text() == "[1]"


def test_a_new_name_if_a_cleanup_removed_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer's cleanup may come between creation and lock."""
    lock = _atomic._lock

    def tidied_first(descriptor: int, wait: bool) -> bool | None:
        monkeypatch.setattr(_atomic, "_lock", lock)
        for path in tmp_path.glob(".*.tmp"):
            _atomic.remove_if_left_behind(path)
        return lock(descriptor, wait)

    monkeypatch.setattr(_atomic, "_lock", tidied_first)
    with atomic_file(tmp_path / "x", "w") as file:
        file.write("here")
    assert (tmp_path / "x").read_text() == "here"
    monkeypatch.setattr(_atomic, "_lock", tidied_first)
    with unfinished_folder(tmp_path / "folder") as temporary:
        assert temporary.is_dir()


def test_others_may_read_a_new_folder_and_not_one_that_replaces_another(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        with unfinished_folder(tmp_path / "new") as temporary:
            assert temporary.stat().st_mode & 0o777 == 0o755
        (tmp_path / "old").mkdir(0o750)
        with unfinished_folder(tmp_path / "old") as temporary:
            assert temporary.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(mask)


def test_planted_links_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    tokens = iter(["guessed", "other"])
    monkeypatch.setattr(_atomic.secrets, "token_hex", lambda _: next(tokens))
    planted = tmp_path / f".x.{_atomic._HOST}-guessed.tmp"
    planted.symlink_to(target)
    with pytest.raises(FileExistsError), replacing(tmp_path / "x"):
        pass
    with atomic_file(tmp_path / "x", "w") as file:
        file.write("here")
    assert target.read_text() == "precious"
    assert planted.is_symlink()
    _atomic.remove_if_left_behind(planted)
    assert planted.is_symlink()


def test_permissions_stay(tmp_path: Path) -> None:
    path = tmp_path / "secret.pt"
    checkpoint.save({"weights": torch.ones(2)}, path)
    for mode in (0o600, 0o640, 0o444):
        path.chmod(mode)
        with replacing(path) as temporary:
            assert not stat.S_IMODE(temporary.stat().st_mode) & 0o077
            torch.save({}, temporary)
        assert stat.S_IMODE(path.stat().st_mode) == mode


def in_child(work: Callable[[], None]) -> str:
    """Return the report of `work` from a forked process that may write only 100 kB to a file."""
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
            work()
            said = "nothing"
        except Exception as error:
            said = f"{type(error).__name__} {getattr(error, 'errno', None)} {error}"
        except BaseException as error:
            said = f"no Exception: {type(error).__name__}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a limit is for a process of its own")
@pytest.mark.parametrize("sharded", [False, True])
def test_a_save_that_is_cut_off(sharded: bool, tmp_path: Path) -> None:
    """The new file is removed, the old one stays, and the error names the path and the system's reason."""
    series = checkpoint.Series(tmp_path / "run", sharded=sharded)
    path = series.save({"weights": torch.ones(2000)}, 1)
    said = in_child(lambda: series.save({"weights": torch.ones(200_000)}, 1) and None)
    assert said.startswith(f"OSError {errno.EFBIG} "), said
    assert f"the checkpoint {path} could not be written; rank 0 had OSError: [Errno {errno.EFBIG}]" in said
    assert names(tmp_path / "run") == [path.name]
    assert (weights_of(path, sharded) == 1).all()


@pytest.mark.parametrize("sharded", [False, True])
def test_a_full_disk_is_named(sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's writer only reports a position, not the reason."""
    path = tmp_path / "checkpoint"
    save: Callable[[Any, Path], None] = checkpoint.save_sharded if sharded else checkpoint.save
    save({"weights": torch.ones(2000)}, path)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def unexpected(*_: object, **__: object) -> None:
        raise RuntimeError("unexpected pos 768 vs 662")

    monkeypatch.setattr(torch, "save", unexpected)
    with pytest.raises(RuntimeError, match=r"checkpoint could not be written; rank 0 had RuntimeError: unexpected pos"):
        save({"weights": torch.ones(2000)}, path)
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(OSError, match=r"checkpoint could not be written; .*No space left on device") as failure:
        save({"weights": torch.ones(2000)}, path)
    assert failure.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert names(tmp_path) == ["checkpoint"]
    assert (weights_of(path, sharded) == 1).all()


def test_values_that_cannot_be_saved_or_do_not_fit(tmp_path: Path) -> None:
    """PyTorch raises an exception that `except Exception` does not catch."""
    path = tmp_path / "checkpoint"
    with pytest.raises(RuntimeError, match=r"could not be written; rank 0 had \w+: .*(pickle|get) local object"):
        checkpoint.save_sharded({"function": lambda: None}, path)
    assert names(tmp_path) == []
    checkpoint.save_sharded({"weights": torch.ones(3)}, path)
    with pytest.raises(RuntimeError, match=r"checkpoint could not be loaded; .*other"):
        checkpoint.load_sharded({"other": torch.ones(3)}, path)
    with pytest.raises(RuntimeError, match=r"checkpoint could not be loaded; .*[Ss]ize"):
        checkpoint.load_sharded({"weights": torch.ones(4)}, path)


def test_an_interrupt_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    for save in (checkpoint.save, checkpoint.save_sharded):
        with pytest.raises(KeyboardInterrupt):
            save({"weights": torch.ones(3)}, tmp_path / "checkpoint")
    assert names(tmp_path) == []
