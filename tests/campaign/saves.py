"""Checkpoints in a campaign: saves that are killed, torn and cut off, files that are damaged or hold code."""

from __future__ import annotations

import errno
import functools
import os
import random
import resource
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from apex import checkpoint
from tests.campaign.trials import Trials, in_child, in_children
from tests.checkpoint import kills, test_untrusted

# Steps that each thread saves.
SAVES = 3


def state_of(number: int) -> dict[str, Any]:
    return {"step": number, "weights": torch.full((5000,), float(number)), "more": [torch.arange(number % 50)]}


def kill(trials: Trials, sharded: bool, same: int | None, use_async: bool = False) -> None:
    """SIGKILL at a random moment of saving: what was said to be saved is there, whole, and so are those before."""
    folder = trials.folder / "run"
    while trials.done < trials.count:
        with trials.expecting(f"after {trials.done} kills"):
            left = trials.count - trials.done
            seed = trials.seed + trials.done
            found = kills.main(folder, left, sharded, same=same, use_async=use_async, seed=seed, told=trials.tell)
            assert not [name for name in found["remaining"] if name.startswith(".")], found["remaining"]
            trials.outcomes["in the middle of a save"] += found["cut_short"]
            trials.outcomes["left something unfinished"] += found["leftovers"]
        shutil.rmtree(folder, ignore_errors=True)
        if trials.failures:
            return


def threads(trials: Trials, sharded: bool) -> None:
    """Threads of two processes save to one path and one series at a time: none fails, and no step is lost."""
    for folder in trials:
        count = trials.rng.randint(2, 4)
        with trials.expecting(f"{count} threads in each of two processes"):
            both = [functools.partial(save_in_threads, folder, sharded, process, count) for process in (0, 1)]
            said = "".join(in_children(both))
            assert not said, said
            series = checkpoint.Series(folder, keep=None, sharded=sharded)
            steps = range(2 * count * SAVES + 1)
            assert sorted(each.name for each in folder.iterdir()) == [series.path_of(step).name for step in steps]
            for step in steps:
                number = whole_number(series.path_of(step), sharded)
                assert number == step or (step == 0 and number in steps), (number, step)
            trials.outcomes["saves"] += 4 * count * SAVES


def save_in_threads(folder: Path, sharded: bool, process: int, count: int) -> str:
    """In each thread some steps that nobody else has, and after each step 0, which all have; returns what failed."""
    series = checkpoint.Series(folder, keep=None, sharded=sharded)
    failures: list[str] = []
    # After a fork PyTorch makes its pool of threads again, where the first threads that need it fall over each other.
    torch.set_num_threads(torch.get_num_threads())

    def work(thread: int) -> None:
        try:
            for index in range(SAVES):
                number = 1 + process + 2 * (thread + count * index)
                for step in (number, 0):
                    series.save(kills.saved(state_of(number), sharded), step)
        except BaseException:
            failures.append(traceback.format_exc())

    in_threads([functools.partial(work, thread) for thread in range(count)])
    return "\n".join(failures)


def in_threads(work: Sequence[Callable[[], Any]]) -> None:
    running = [threading.Thread(target=each) for each in work]
    for each in running:
        each.start()
    for each in running:
        each.join()


def whole_number(path: Path, sharded: bool) -> int:
    """The number that a checkpoint of `state_of` is of; all elements must agree."""
    state: dict[str, Any] = {"weights": torch.zeros(5000)}
    if sharded:
        checkpoint.load_sharded(state, path)
    else:
        state = checkpoint.load(path)
    number = int(state["weights"][0])
    assert torch.equal(state["weights"], state_of(number)["weights"])
    return number


def full_disk(trials: Trials) -> None:
    """A file may not grow beyond a random length: the save raises OSError, the old checkpoint stays, nothing else."""
    for folder in trials:
        sharded = trials.rng.random() < 0.5
        series = checkpoint.Series(folder / "run", sharded=sharded)
        path = series.save(kills.saved(state_of(1), sharded), 1)
        limit = trials.rng.randrange(20_000)

        def save(series: checkpoint.Series = series, limit: int = limit) -> str:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            try:
                series.save(kills.saved(state_of(2), series.sharded), 1)
            except OSError as error:
                return "OSError" if error.errno == errno.EFBIG and "could not be written" in str(error) else repr(error)
            return "no error"

        with trials.expecting(f"a limit of {limit} bytes, {'sharded' if sharded else 'a file'}"):
            said = in_child(save)
            assert said == "OSError", said
            assert [each.name for each in (folder / "run").iterdir()] == [path.name]
            assert whole_number(path, sharded) == 1


def damaged(content: bytes, rng: random.Random) -> bytes:
    """A copy with bits flipped, bytes zeroed, cut off, added, or two stretches swapped."""
    changed = bytearray(content)
    kind = rng.choice(("flip", "zero", "cut", "add", "swap"))
    at = rng.randrange(len(changed))
    size = min(len(changed) - at, rng.choice((1, 1, 16, 512, 4096)))
    if kind == "flip":
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    elif kind == "zero":
        changed[at : at + size] = bytes(size)
    elif kind == "cut":
        del changed[at:]
    elif kind == "add":
        changed += rng.randbytes(size)
    else:
        other = rng.randrange(len(changed) - size + 1)
        changed[at : at + size], changed[other : other + size] = changed[other : other + size], changed[at : at + size]
    return bytes(changed)


def damage(trials: Trials, sharded: bool) -> None:
    """Loading raises DamagedCheckpoint, or gives what was saved: never other values, another error or a crash."""
    original = trials.folder / "original"
    checkpoint.Series(original, sharded=sharded).save(kills.saved(state_of(7), sharded), 7)
    (name,) = (each.name for each in original.iterdir())

    def load(path: Path) -> str:
        try:
            assert whole_number(path, sharded) == 7
        except checkpoint.DamagedCheckpoint:
            return "noticed"
        return "harmless"

    for folder in trials:
        path = folder / name
        (shutil.copytree if sharded else shutil.copy)(original / name, path)
        target = trials.rng.choice(sorted(path.iterdir())) if sharded else path
        content = target.read_bytes()
        target.write_bytes(damaged(content, trials.rng))
        with trials.expecting(f"{target.name}, trial {trials.done}"):
            said = in_child(lambda path=path: load(path))
            assert said in ("noticed", "harmless"), said
            trials.outcomes[said] += 1


def code(trials: Trials) -> None:
    """Code in any place of any kind of file, called in several ways: it is refused, and does not run."""

    def executed(folder: Path) -> tuple[Any, ...]:
        return exec, (f"import os; os.mkdir({os.fspath(folder)!r})",)

    def reached(folder: Path) -> tuple[Any, ...]:
        return getattr(os, "mkdir"), (os.fspath(folder),)  # noqa: B009

    def applied(folder: Path) -> tuple[Any, ...]:
        return map, (os.mkdir, [os.fspath(folder)])

    def touched(folder: Path) -> tuple[Any, ...]:
        return Path.mkdir, (folder,)

    ways = (executed, reached, applied, touched)
    for folder in trials:
        place = trials.rng.choice(test_untrusted.PLACES)
        way = trials.rng.choice(ways)
        payload = type("Payload", (), {"__reduce__": lambda _, way=way, folder=folder: way(folder / "ran")})()

        def load(place: Callable[..., None] = place, folder: Path = folder, payload: Any = payload) -> str:
            try:
                place(folder, payload)
            except Exception:
                return "refused"
            return "loaded"

        with trials.expecting(f"{place.__name__}, {way.__name__}"):
            said = in_child(load)
            assert said == "refused", said
            assert not (folder / "ran").exists()
            trials.outcomes[place.__name__] += 1


def metadata(trials: Trials) -> None:
    """Random changes of a sharded checkpoint's metadata, with a manifest that fits: refused, or read; never run."""
    original = trials.folder / "original"
    checkpoint.save_sharded({"weights": torch.ones(50), "step": 3}, original)
    for folder in trials:
        path = folder / "changed"
        shutil.copytree(original, path)
        content = (path / ".metadata").read_bytes()
        (path / ".metadata").write_bytes(damaged(content, trials.rng))
        test_untrusted.signed(path)

        def load(path: Path = path) -> str:
            try:
                checkpoint.load_sharded({"weights": torch.zeros(50), "step": 0}, path)
            except Exception as error:
                return type(error).__name__
            return "loaded"

        with trials.expecting(f"trial {trials.done}"):
            said = in_child(load)
            assert said in ("DamagedCheckpoint", "RuntimeError", "loaded"), said
            trials.outcomes[said] += 1
