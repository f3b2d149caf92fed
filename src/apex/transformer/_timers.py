"""Stopwatches under names, which wait for the GPU where there is one."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist


class _Timer:
    """Seconds between `start` and `stop`, added up until `reset`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._total = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Starts counting."""
        assert self._since is None, f"timer {self.name} has already been started"
        self._since = _now()

    def stop(self) -> None:
        """Adds the time since `start`."""
        assert self._since is not None, f"timer {self.name} is not started"
        self._total += _now() - self._since
        self._since = None

    def reset(self) -> None:
        """Back to zero, and not running."""
        self._total, self._since = 0.0, None

    def elapsed(self, reset: bool = True) -> float:
        """The seconds so far; a timer that runs goes on running."""
        running = self._since is not None
        if running:
            self.stop()
        seconds = self._total
        if reset:
            self.reset()
        if running:
            self.start()
        return seconds


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


class Timers:
    """`timers(name)` is the timer of this name, made at first use."""

    def __init__(self) -> None:
        self.timers: dict[str, _Timer] = {}

    def __call__(self, name: str) -> _Timer:
        return self.timers.setdefault(name, _Timer(name))

    def write(
        self, names: Iterable[str], writer: Any, iteration: int, normalizer: float = 1.0, reset: bool = False
    ) -> None:
        """Gives seconds / normalizer of each timer to a TensorBoard writer, under the name with "-time" after it."""
        assert normalizer > 0.0, f"normalizer must be positive, got {normalizer}"
        for name in names:
            writer.add_scalar(f"{name}-time", self.timers[name].elapsed(reset=reset) / normalizer, iteration)

    def log(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> None:
        """Prints milliseconds / normalizer of each timer, on the last rank."""
        assert normalizer > 0.0, f"normalizer must be positive, got {normalizer}"
        times = [f"{name}: {self.timers[name].elapsed(reset=reset) * 1000.0 / normalizer:.2f}" for name in names]
        if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
            print(" | ".join(["time (ms)", *times]), flush=True)
