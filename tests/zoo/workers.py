"""Processes that judge models one after the other; one that takes too long, or dies, is replaced."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .judge import judge
from .table import find

_SPAWN = multiprocessing.get_context("spawn")  # a fork could not use a GPU
_STARTING = 120.0  # seconds that a process may take longer for its first model, because it imports libraries
_MEMORY = 16 * 2**30  # bytes that a process may address on a CPU


class Worker:
    """A process with a pipe, and the key of the model that it judges."""

    def __init__(self, device: str, precisions: tuple[str, ...], seeds: int) -> None:
        self.pipe, theirs = _SPAWN.Pipe()
        arguments = (theirs, device, precisions, seeds)
        self.process = _SPAWN.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.key, self.began, self.limit = "", 0.0, 0.0
        self._is_new = True

    def give(self, key: str, limit: float) -> None:
        """Let the process judge a model, in so many seconds."""
        self.key, self.began = key, time.monotonic()
        self.limit = limit + _STARTING * self._is_new
        self._is_new = False
        self.pipe.send(key)

    def answer(self) -> dict[str, Any] | None:
        """Return the row of the model, what went wrong with the process, or None if it is still busy."""
        try:
            if self.pipe.poll():
                return self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return {"died": f"the process ended with exit code {self.process.exitcode}"}
        if time.monotonic() - self.began > self.limit:
            return {"died": f"took longer than {self.limit:.0f} s"}
        return None

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def run(
    keys: Sequence[str], device: str, precisions: tuple[str, ...], seeds: int, jobs: int, limit: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Judge models in `jobs` processes; yield keys and rows as they come. A model takes `limit` seconds at most."""
    waiting, workers = list(reversed(keys)), list[Worker]()
    try:
        while waiting or workers:
            while waiting and len(workers) < jobs:
                workers.append(Worker(device, precisions, seeds))
                workers[-1].give(waiting.pop(), limit)
            multiprocessing.connection.wait([worker.pipe for worker in workers], timeout=1)
            for worker in list(workers):
                row = worker.answer()
                if row is None:
                    continue
                row["seconds"] = round(time.monotonic() - worker.began, 1)
                yield worker.key, row
                if waiting and "died" not in row:
                    worker.give(waiting.pop(), limit)
                else:
                    worker.stop()
                    workers.remove(worker)
    finally:
        for worker in workers:
            worker.stop()


def _serve(pipe: Any, device: str, precisions: tuple[str, ...], seeds: int) -> None:
    """Judge the models whose keys come through the pipe."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:  # what models print is in nobody's way
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    if device == "cuda":  # float32 is the truth
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    else:
        _limit_memory()
    while True:
        try:
            key = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            row = judge(find(key), device, precisions, seeds)
        except BaseException as error:
            row = {"absent": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        pipe.send(row)


def _limit_memory() -> None:
    """Let a model that asks for too much memory fail, before the system ends other processes for it."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
