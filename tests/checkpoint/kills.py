"""A process that saves without pause and is killed at random moments; run by test_kills.py.

Torch is imported once: each process that is killed is a fork of this one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from apex import checkpoint
from apex.checkpoint import _background
from tests.support.forked_writer import ForkedWriter
from tests.support.forks import fork

KEEP = 3
ELEMENTS = 100_000


def content(step: int) -> dict[str, Any]:
    return {"step": step, "weights": torch.full((ELEMENTS,), float(step)), "more": [torch.arange(step % 50)]}


def saved(state: dict[str, Any], sharded: bool) -> dict[str, Any]:
    """Return the part of a state that is saved: several processes save only tensors."""
    return {"weights": state["weights"]} if sharded else state


def save_forever(series: checkpoint.Series, same: int | None, first: int, pipe: int, use_async: bool) -> None:
    """Report each save through the pipe before and after it; save the `same` step, or increasing steps.

    An asynchronous save is done when the next one has waited for it.
    """
    number = first
    while True:
        os.write(pipe, b"begin %d\n" % number)
        state, step = saved(content(number), series.sharded), number if same is None else same
        series.save(state, step, use_async=use_async)
        state["weights"].zero_()  # what is saved is the state at the time of the call
        if not use_async or number > first:
            os.write(pipe, b"done %d\n" % (number - use_async))
        number += 1


def kill_while_saving(
    series: checkpoint.Series, same: int | None, first: int, delay: float, use_async: bool, with_writer: bool
) -> tuple[int, int]:
    """Return the number of the last save that was begun, and of the last one that was done (-1: none).

    The process that saves asynchronously is killed alone or together with its writer, which otherwise finishes the
    save that it has begun.
    """
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        os.close(reading)
        try:
            os.setsid()
            save_forever(series, same, first, writing, use_async)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as said:
        lines = [said.readline()]  # the first save has begun
        time.sleep(delay)
        (os.killpg if with_writer else os.kill)(child, signal.SIGKILL)
        lines += said.readlines()  # to the end, when the writer has ended as well
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status), f"the process failed by itself: {lines}"
    told = [(line.split()[0], int(line.split()[1])) for line in lines if line.endswith("\n")]
    return max(step for word, step in told if word == "begin"), max(
        (step for word, step in told if word == "done"), default=-1
    )


def number_in(path: Path, sharded: bool) -> int:
    """Return the number of the save that a checkpoint is of, which every element of it holds."""
    if sharded:
        state: dict[str, Any] = {"weights": torch.zeros(ELEMENTS)}
        checkpoint.load_sharded(state, path)
    else:
        state = checkpoint.load(path)
    number = int(state["weights"][0])
    expected = content(number)
    assert torch.equal(state["weights"], expected["weights"])
    assert sharded or state["step"] == number
    return number


def main(
    folder: Path,
    kills: int,
    sharded: bool,
    *,
    same: int | None = None,
    use_async: bool = False,
    seed: int = 0,
    told: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Save the `same` step again and again, or a new one each time; call `told` after each kill."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rng = random.Random(seed)
    _background.start_process = ForkedWriter
    series = checkpoint.Series(folder, keep=KEEP, sharded=sharded)
    for _ in range(2):  # the first one imports
        start = time.perf_counter()
        series.save(saved(content(0), sharded), same or 0)
        typical = time.perf_counter() - start
    done, cut_short, leftovers = 0, 0, 0
    for _ in range(kills):
        delay, with_writer = rng.uniform(0, 3 * typical), use_async and rng.random() < 0.5
        begun, finished = kill_while_saving(series, same, done + 1, delay, use_async, with_writer)
        cut_short += begun != finished
        leftovers += any(path.name.startswith(".") for path in folder.iterdir())
        path = series.latest()
        assert path is not None
        found = number_in(path, sharded)
        # Every save that was reported as done exists, and none that was not begun.
        assert max(done, finished) <= found <= begun, (done, finished, found, begun)
        if same is None:
            # The newest name is the newest whole one, and those before are whole as well.
            names = sorted(each.name for each in folder.iterdir() if not each.name.startswith("."))
            assert names[-1] == path.name == series.path_of(found).name
            assert len(names) >= min(KEEP, found + 1)
            for name in names:
                checkpoint.verify(folder / name)
        done = found
        told()
    series.save(saved(content(done + 1), sharded), done + 1 if same is None else same)
    remaining = sorted(each.name for each in folder.iterdir())
    return {"saved": done, "cut_short": cut_short, "leftovers": leftovers, "remaining": remaining}


if __name__ == "__main__":
    kind = sys.argv[3]
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), kind != "file", use_async=kind == "asynchronous")))
