"""Runs of several ranks, each a fork of this process that may kill itself: what scripts of killed runs share."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support.forks import fork

PATIENCE = timedelta(seconds=40)


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def start(runs: Mapping[str, int], folder: Path, work: Callable[[str, Path], None]) -> dict[str, list[int]]:
    """Runs by name and number of ranks, all at a time, each in a folder of its own; the exit codes of their ranks."""
    children = {}
    for name, ranks in runs.items():
        (folder / name).mkdir(exist_ok=True)
        for rank in range(ranks):
            child = fork()
            if not child:
                os._exit(_run_rank(name, folder / name, rank, ranks, work))
            children[child] = name, rank
    ends = {name: [0] * ranks for name, ranks in runs.items()}
    for child, (name, rank) in children.items():
        ends[name][rank] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return ends


def _run_rank(name: str, folder: Path, rank: int, ranks: int, work: Callable[[str, Path], None]) -> int:
    with open(folder / f"rank{rank}.txt", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            store = f"file://{folder}/store"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=PATIENCE)
            work(name, folder)
        except BaseException:
            traceback.print_exc(file=output)
            return 1
    return 0
