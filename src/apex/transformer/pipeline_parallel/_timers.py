"""Named timers that print how long the parts of a training step take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["_Timers"]


def _wait_for_device() -> None:
    """Wait for the GPU, if it is in use, so that times include the work that was queued."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


class _Timer:
    """A stopwatch that adds up the seconds between `start` and `stop`."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.elapsed_ = 0.0
        self.started_ = False
        self.start_time = 0.0

    def start(self) -> None:
        """Start the timer after all queued work is done."""
        assert not self.started_, f"timer {self.name_!r} has already been started"
        _wait_for_device()
        self.start_time = time.time()
        self.started_ = True

    def stop(self) -> None:
        """Stop the timer after all queued work is done."""
        assert self.started_, f"timer {self.name_!r} is not started"
        _wait_for_device()
        self.elapsed_ += time.time() - self.start_time
        self.started_ = False

    def reset(self) -> None:
        """Set the time to zero and stop the timer."""
        self.elapsed_ = 0.0
        self.started_ = False

    def elapsed(self, reset: bool = True) -> float:
        """Return the seconds so far. A running timer continues; with `reset` it continues from zero."""
        running = self.started_
        if running:
            self.stop()
        seconds = self.elapsed_
        if reset:
            self.reset()
        if running:
            self.start()
        return seconds


class _Timers:
    """Timers by name: `timers("forward").start()`."""

    def __init__(self) -> None:
        self.timers: dict[str, _Timer] = {}

    def __call__(self, name: str) -> _Timer:
        return self.timers.setdefault(name, _Timer(name))

    def write(
        self, names: Sequence[str], writer: Any, iteration: int, normalizer: float = 1.0, reset: bool = False
    ) -> None:
        """Write seconds divided by `normalizer` as scalars `<name>-time` to a TensorBoard writer."""
        assert normalizer > 0.0, f"normalizer must be positive, got {normalizer}"
        for name in names:
            writer.add_scalar(f"{name}-time", self(name).elapsed(reset=reset) / normalizer, iteration)

    def log(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> None:
        """Print milliseconds divided by `normalizer` in the last process."""
        assert normalizer > 0.0, f"normalizer must be positive, got {normalizer}"
        words = "time (ms)"
        for name in names:
            words += f" | {name}: {self(name).elapsed(reset=reset) * 1000.0 / normalizer:.2f}"
        if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
            print(words, flush=True)
