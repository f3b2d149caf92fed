"""A process that saves without pause, killed at random moments; run by test_kills.py.

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
from pathlib import Path
from typing import Any

import torch

from apex import checkpoint

KEEP = 3
ELEMENTS = 100_000


def content(step: int) -> dict[str, Any]:
    return {"step": step, "weights": torch.full((ELEMENTS,), float(step)), "more": [torch.arange(step % 50)]}


def save_forever(series: checkpoint.Series, sharded: bool, first: int, pipe: int) -> None:
    """Says through the pipe before and after each save."""
    step = first
    while True:
        os.write(pipe, b"begin %d\n" % step)
        state = content(step)
        series.save({"weights": state["weights"]} if sharded else state, step)
        os.write(pipe, b"done %d\n" % step)
        step += 1


def kill_while_saving(series: checkpoint.Series, sharded: bool, first: int, delay: float) -> tuple[int, int]:
    """The last step that was begun, and the last one that was done (-1: none)."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            save_forever(series, sharded, first, writing)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as said:
        lines = [said.readline()]  # the first save has begun
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        lines += said.readlines()
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status), f"the process failed by itself: {lines}"
    told = [(line.split()[0], int(line.split()[1])) for line in lines if line.endswith("\n")]
    return max(step for word, step in told if word == "begin"), max(
        (step for word, step in told if word == "done"), default=-1
    )


def main(folder: Path, kills: int, sharded: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rng = random.Random(0)
    series = checkpoint.Series(folder, keep=KEEP, sharded=sharded)
    for _ in range(2):  # the first one imports
        start = time.perf_counter()
        series.save({"weights": content(0)["weights"]} if sharded else content(0), 0)
        typical = time.perf_counter() - start
    done, cut_short, leftovers = 0, 0, 0
    for _ in range(kills):
        begun, finished = kill_while_saving(series, sharded, done + 1, rng.uniform(0, 3 * typical))
        cut_short += begun != finished
        leftovers += any(path.name.endswith(".tmp") for path in folder.iterdir())
        path = series.latest()
        assert path is not None
        found = int(path.name.removesuffix(".pt").split("-")[1])
        # What was said to be done is there, and nothing that was not begun.
        assert max(done, finished) <= found <= begun, (done, finished, found, begun)
        # The newest name is the newest whole one, and those before are whole as well.
        names = sorted(each.name for each in folder.iterdir() if not each.name.startswith("."))
        assert names[-1] == path.name
        assert len(names) >= min(KEEP, found + 1)
        for name in names:
            checkpoint.verify(folder / name)
        expected = content(found)
        if sharded:
            state = {"weights": torch.zeros(ELEMENTS)}
            checkpoint.load_sharded(state, path)
            assert torch.equal(state["weights"], expected["weights"])
        else:
            loaded = series.load()
            assert loaded["step"] == found
            assert torch.equal(loaded["weights"], expected["weights"])
        done = found
    series.save({"weights": content(done + 1)["weights"]} if sharded else content(done + 1), done + 1)
    remaining = sorted(each.name for each in folder.iterdir())
    return {"saved": done, "cut_short": cut_short, "leftovers": leftovers, "remaining": remaining}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "sharded")))
