"""Asynchronous saves in one process: contents, one at a time, errors, writers that end."""

from __future__ import annotations

import errno
import io
import json
import os
import select
import shutil
import signal
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apex import checkpoint
from apex.booster import Booster
from apex.checkpoint import _background, _writer
from tests.support.forks import fork

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="writers are forked"),
    pytest.mark.usefixtures("forked_writers"),
]


def pid() -> int:
    return _background._writer_of_process._process.pid


def loaded(path: Path, **state: Any) -> dict[str, Any]:
    checkpoint.load_sharded(state, path)
    return state


def test_the_state_at_the_time_of_the_call_is_saved(tmp_path: Path) -> None:
    x, half = torch.arange(12.0), torch.ones(3, dtype=torch.bfloat16)
    state = {
        "x": x,
        "strided": x.view(3, 4).t(),
        "half": half,
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "nested": {"step": 5},
    }
    checkpoint.save_sharded(state, tmp_path / "a", use_async=True)
    x.zero_()
    half.zero_()
    state["nested"]["step"] = 6
    found = loaded(
        tmp_path / "a",
        x=torch.zeros(12),
        strided=torch.zeros(4, 3),
        half=torch.zeros(3, dtype=torch.bfloat16),
        none=torch.empty(0, 3),
        scalar=torch.tensor(0),
        nested={"step": 0},
    )
    assert found["x"].tolist() == list(range(12))
    assert torch.equal(found["strided"], torch.arange(12.0).view(3, 4).t())
    assert found["half"].tolist() == [1.0] * 3
    assert found["scalar"].item() == 7
    assert found["nested"] == {"step": 5}
    checkpoint.verify(tmp_path / "a")


def test_both_ways_of_saving_write_the_same_bytes(tmp_path: Path) -> None:
    state = {"model": nn.Linear(30, 40).state_dict(), "step": 3}
    checkpoint.save_sharded(state, tmp_path / "plain")
    checkpoint.save_sharded(state, tmp_path / "async", use_async=True)
    checkpoint.wait()
    both = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("plain", "async")]
    assert both[0].keys() == both[1].keys()
    assert both[0]["__0_0.distcp"] == both[1]["__0_0.distcp"]  # the metadata name the temporary folder


def test_larger_states_get_new_memory_and_smaller_ones_reuse_it(tmp_path: Path) -> None:
    series = checkpoint.Series(tmp_path, keep=2, sharded=True)
    for step, size in enumerate((10, 100_000, 10, 200_000)):
        series.save({"x": torch.full((size,), float(step))}, step, use_async=True)
    assert series.latest() == series.path_of(3)
    assert loaded(series.path_of(3), x=torch.zeros(200_000))["x"].unique().tolist() == [3.0]
    assert loaded(series.path_of(2), x=torch.zeros(10))["x"].tolist() == [2.0] * 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_second_save_waits_or_refuses(tmp_path: Path) -> None:
    checkpoint.save_sharded({"x": torch.ones(2)}, tmp_path / "a", use_async=True)
    checkpoint.wait()
    os.kill(pid(), signal.SIGSTOP)
    try:
        checkpoint.save_sharded({"x": torch.ones(2)}, tmp_path / "a", use_async=True)
        with pytest.raises(checkpoint.SaveInProgress, match="b was not saved: the save before it is still"):
            checkpoint.save_sharded({"x": torch.ones(2)}, tmp_path / "b", use_async=True, if_busy="raise")
    finally:
        os.kill(pid(), signal.SIGCONT)
    checkpoint.save_sharded({"x": torch.zeros(2)}, tmp_path / "b", use_async=True)
    assert (tmp_path / "a").is_dir()
    checkpoint.wait()
    checkpoint.save_sharded({"x": torch.zeros(2)}, tmp_path / "c", use_async=True, if_busy="raise")
    checkpoint.wait()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c"}


@pytest.mark.parametrize("asks", ["wait", "save", "save_async", "load", "latest"])
def test_an_error_is_raised_by_the_next_call(asks: str, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a user's file")
    checkpoint.save_sharded({"x": torch.ones(2)}, tmp_path, use_async=True)
    calls = {
        "wait": checkpoint.wait,
        "save": lambda: checkpoint.save_sharded({"x": torch.ones(2)}, tmp_path / "other"),
        "save_async": lambda: checkpoint.save_sharded({"x": torch.ones(2)}, tmp_path / "other", use_async=True),
        "load": lambda: checkpoint.load_sharded({"x": torch.ones(2)}, tmp_path / "other"),
        "latest": checkpoint.Series(tmp_path, sharded=True).latest,
    }
    with pytest.raises(OSError, match=r"could not be written; rank 0 had FileExistsError") as caught:
        calls[asks]()
    assert caught.value.errno == errno.EEXIST
    assert str(caught.value).count("[Errno") == 2  # of the error, and of its reason
    checkpoint.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    checkpoint.save_sharded({"x": torch.ones(2)}, tmp_path / "new", use_async=True)
    checkpoint.wait()
    assert (tmp_path / "new").is_dir()


def test_a_writer_that_is_killed_is_reported_and_replaced(tmp_path: Path) -> None:
    checkpoint.save_sharded({"x": torch.ones(2)}, tmp_path / "a", use_async=True)
    checkpoint.wait()
    os.kill(pid(), signal.SIGKILL)
    checkpoint.save_sharded({"x": torch.zeros(2)}, tmp_path / "a", use_async=True)
    with pytest.raises(RuntimeError, match="a could not be written; the process that writes for rank 0 ended with"):
        checkpoint.wait()
    assert loaded(tmp_path / "a", x=torch.zeros(2))["x"].tolist() == [1.0, 1.0]
    checkpoint.save_sharded({"x": torch.zeros(2)}, tmp_path / "a", use_async=True)
    assert loaded(tmp_path / "a", x=torch.ones(2))["x"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("limit", "most", "number"), [("FSIZE", 512, errno.EFBIG), ("NOFILE", 8, errno.EMFILE)])
@pytest.mark.parametrize("whole", [False, True])
def test_an_error_of_the_disk_in_the_writer_leaves_the_old_checkpoint(
    whole: bool, limit: str, most: int, number: int, tmp_path: Path
) -> None:
    """The error has the system's number; nothing unfinished stays, and the next save has a new writer."""
    path, booster = tmp_path / "a", Booster("cpu")

    def save(value: float) -> None:
        if whole:
            booster.save_model(nn.ParameterDict({"x": torch.full((1000,), value)}), path, shard=True, use_async=True)
        else:
            checkpoint.save_sharded({"x": torch.full((1000,), value)}, path, use_async=True)

    def value() -> float:
        if not whole:
            return float(loaded(path, x=torch.zeros(1000))["x"][0])
        booster.load_model(model := nn.ParameterDict({"x": torch.zeros(1000)}), path)
        return float(model["x"][0])

    resource = pytest.importorskip("resource")
    save(1.0)
    checkpoint.wait()
    kind = getattr(resource, f"RLIMIT_{limit}")
    resource.prlimit(pid(), kind, (most, resource.getrlimit(kind)[1]))
    save(2.0)
    with pytest.raises(OSError, match=r"a could not be written; rank 0 had OSError") as caught:
        checkpoint.wait()
    assert caught.value.errno == number
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    assert value() == 1.0
    save(3.0)
    checkpoint.wait()
    assert value() == 3.0


def test_states_that_cannot_be_copied_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"could not be written; rank 0 had .*local object"):
        checkpoint.save_sharded({"function": lambda: None}, tmp_path / "a", use_async=True)
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(RuntimeError, match="rank 0 had TypeError: an asynchronous save needs dense tensors"):
        checkpoint.save_sharded({"x": sparse}, tmp_path / "a", use_async=True)
    checkpoint.wait()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"staging": "disk"}, 'staging must be "host" or "device", got \'disk\''),
        ({"if_busy": "skip"}, 'if_busy must be "wait" or "raise", got \'skip\''),
    ],
)
@pytest.mark.parametrize("use_async", [False, True])
def test_unknown_options_are_refused(options: dict[str, Any], message: str, use_async: bool, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        checkpoint.save_sharded({"x": torch.ones(2)}, tmp_path / "a", use_async=use_async, **options)
    with pytest.raises(ValueError, match=message):
        checkpoint.Series(tmp_path).save({"x": torch.ones(2)}, 1, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("use_async", [False, True])
def test_a_state_that_is_no_dict_is_refused_by_name(use_async: bool, tmp_path: Path) -> None:
    state: Any = [torch.ones(2)]
    with pytest.raises(TypeError, match="state must be a dict"):
        checkpoint.save_sharded(state, tmp_path / "a", use_async=use_async)
    with pytest.raises(TypeError, match="state must be a dict"):
        checkpoint.load_sharded(state, tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_a_series_of_files_is_not_saved_asynchronously(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"use_async=True needs a sharded series"):
        checkpoint.Series(tmp_path).save({"x": torch.ones(2)}, 1, use_async=True)


def test_threads_that_save_at_once_take_turns(tmp_path: Path) -> None:
    """There is memory for one save: a thread must not copy into it while the other's is written."""
    checkpoint.save_sharded({"x": torch.ones(2)}, tmp_path / "first", use_async=True)
    checkpoint.wait()  # the writer is forked now: a fork of a process with several threads may wait for ever
    shutil.rmtree(tmp_path / "first")

    def save(thread: int) -> None:
        for number in range(4):
            state = {"x": torch.full((50_000,), float(10 * thread + number))}
            checkpoint.save_sharded(state, tmp_path / f"{thread}{number}", use_async=True)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    checkpoint.wait()
    for path in tmp_path.iterdir():
        assert loaded(path, x=torch.zeros(50_000))["x"].unique().tolist() == [float(path.name)]
    assert len(list(tmp_path.iterdir())) == 8


def test_an_interrupted_wait_leaves_the_save_in_flight(tmp_path: Path) -> None:
    """After Ctrl-C a script saves once more: the memory of the save in flight must not be used for that."""
    checkpoint.save_sharded({"x": torch.ones(2)}, tmp_path / "a", use_async=True)
    checkpoint.wait()
    writer = pid()
    os.kill(writer, signal.SIGSTOP)
    checkpoint.save_sharded({"x": torch.full((2,), 2.0)}, tmp_path / "b", use_async=True)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    threading.Timer(0.6, os.kill, (writer, signal.SIGCONT)).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            checkpoint.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    checkpoint.save_sharded({"x": torch.full((2,), 3.0)}, tmp_path / "c", use_async=True)
    found = [loaded(tmp_path / name, x=torch.zeros(2))["x"][0].item() for name in "abc"]
    assert found == [1.0, 2.0, 3.0]


def test_forked_processes_save_on_their_own_and_hold_no_writer(tmp_path: Path) -> None:
    checkpoint.save_sharded({"x": torch.ones(2)}, tmp_path / "a", use_async=True)
    checkpoint.wait()
    reading, writing = os.pipe()
    child = fork()
    if not child:
        try:
            checkpoint.save_sharded({"x": torch.zeros(2)}, tmp_path / "b", use_async=True)
            checkpoint.wait()
            os.write(writing, b"saved")
            signal.pause()  # a worker that outlives the writer
        finally:
            os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 10) == b"saved"
        process = _background._writer_of_process._process
        _background._close()
        assert process._status == 0  # it has ended in time
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert (tmp_path / "b").is_dir()


def test_another_process_group_gets_another_writer(tmp_path: Path) -> None:
    checkpoint.save_sharded({"x": torch.ones(2)}, tmp_path / "a", use_async=True)
    checkpoint.wait()
    first = _background._writer_of_process
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert not first.is_usable()
    finally:
        torch.distributed.destroy_process_group()
    assert first.is_usable()


def test_a_writer_that_meets_nobody_ends_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the writers of a run that was killed and started again would keep their memory for half an hour."""
    monkeypatch.setattr(_writer, "_WATCH_SECONDS", 0.05)
    reading, writing = os.pipe()
    parent = fork()
    if not parent:
        parent = os.getpid()
        if not fork():
            with _writer._ending_with(parent):
                signal.pause()
        os._exit(0)
    os.close(writing)
    os.waitpid(parent, 0)
    ended = select.select([reading], [], [], 60)[0]  # the pipe's end, which the writer held
    os.close(reading)
    assert ended


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint16, torch.float16, torch.complex64, torch.float8_e4m3fn, torch.float64], ids=str
)
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    saved = torch.arange(6.0).view(2, 3).to(dtype).t()
    checkpoint.save_sharded({"x": saved}, tmp_path / "a", use_async=True)
    found = loaded(tmp_path / "a", x=torch.zeros(3, 2).to(dtype))["x"]
    assert found.tolist() == saved.tolist()


def test_views_and_tied_tensors(tmp_path: Path) -> None:
    base, imaginary = torch.arange(20.0), torch.ones(2, dtype=torch.complex64).mul(1j).conj()
    state = {
        "expanded": torch.ones(1).expand(5),
        "strided": base[::3],
        "tied": base,
        "parameter": nn.Parameter(base),
        "conjugate": imaginary,
        "negative": imaginary.imag,
    }
    checkpoint.save_sharded(state, tmp_path / "a", use_async=True)
    found = loaded(
        tmp_path / "a", **{name: torch.zeros(value.shape, dtype=value.dtype) for name, value in state.items()}
    )
    for name, value in state.items():
        assert torch.equal(found[name], value.detach()), name


SCRIPT = """
    import os, sys
    import torch
    from apex import checkpoint

    # No guard around the code: the writer does not run the script again.
    print("once", flush=True)
    path = sys.argv[1]
    checkpoint.save_sharded({"x": torch.arange(4.0)}, os.path.join(path, "good"), use_async=True)
    checkpoint.save_sharded({"x": torch.arange(4.0)}, path, use_async=True)
"""


def test_a_script_ends_with_a_status(tmp_path: Path) -> None:
    """The one test with a real writer process: it is started, finishes at exit, and its error gives the status."""
    from tests.checkpoint.test_kills import SOURCE
    from tests.support.warm import run_python

    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "random.py").write_text("raise ImportError('not the module of Python')")  # the writer must not find it
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = run_python(str(script), str(tmp_path), cwd=tmp_path, environment=environment, timeout=200)
    assert done.returncode == 1, done.stderr
    assert done.stdout == "once\n"
    assert "could not be written" in done.stderr
    assert "holds files and is no checkpoint" in done.stderr
    assert loaded(tmp_path / "good", x=torch.zeros(4))["x"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_small_tensors_lie_together_in_memory() -> None:
    pickler = _writer.Pickler(io.BytesIO())
    tensors = [torch.empty(size, dtype=torch.uint8) for size in (1, 2 << 20, 600, 0, 1 << 20, 1023)]
    pickler.dump(tensors)
    assert [offset for _, offset in pickler.tensors] == [0, 4 << 20, 512, 1536, 6 << 20, 1536]
    assert pickler.size == 7 << 20
    pickler.dump([torch.empty((1 << 20) - 1, dtype=torch.uint8) for _ in range(4)])
    offsets = [offset for _, offset in pickler.tensors][6:]
    assert offsets == [2560, (1 << 20) + 2560, (2 << 20) + 2560, 7 << 20]  # the fourth needs a new page
