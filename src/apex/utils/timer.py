"""Stopwatches that wait for the device."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ..accelerator import get_accelerator

__all__ = ["MultiTimer", "Timer"]


class Timer:
    """A stopwatch in seconds with a history of measurements."""

    def __init__(self) -> None:
        self._started: float = 0.0
        self._elapsed: float = 0.0
        self._history: list[float] = []

    @property
    def has_history(self) -> bool:
        """Whether a measurement was kept."""
        return bool(self._history)

    @property
    def current_time(self) -> float:
        """The time in seconds, after the device has finished."""
        get_accelerator().synchronize()
        return time.perf_counter()

    def start(self) -> None:
        """Start measuring."""
        self._started = self.current_time

    def lap(self) -> float:
        """Return the seconds since the start."""
        return self.current_time - self._started

    def stop(self, keep_in_history: bool = False) -> float:
        """Return the seconds since the start, and keep them in the history if asked."""
        self._elapsed = self.lap()
        if keep_in_history:
            self._history.append(self._elapsed)
        return self._elapsed

    def get_elapsed_time(self) -> float:
        """Return the last measurement; an error without one."""
        assert self._elapsed, "the timer has measured nothing yet"
        return self._elapsed

    def get_history_sum(self) -> float:
        """Return the sum of the history."""
        return sum(self._history)

    def get_history_mean(self) -> float:
        """Return the mean of the history."""
        return sum(self._history) / len(self._history)

    def reset(self) -> None:
        """Forget all measurements."""
        self._started = self._elapsed = 0.0
        self._history = []


class MultiTimer:
    """Timers by name; with `on=False` nothing is measured."""

    def __init__(self, on: bool = True) -> None:
        self._on = on
        self._timers: dict[str, Timer] = {}

    @property
    def is_on(self) -> bool:
        """Whether the timers measure."""
        return self._on

    def set_status(self, mode: bool = True) -> None:
        """Turn measuring on or off."""
        self._on = mode

    def start(self, name: str) -> None:
        """Start the timer `name`."""
        if self._on:
            self._timers.setdefault(name, Timer()).start()

    def stop(self, name: str, keep_in_history: bool) -> float | None:
        """Stop the timer `name` and return its seconds; None if timers are off."""
        return self._timers[name].stop(keep_in_history) if self._on else None

    def get_timer(self, name: str) -> Timer:
        """Return the timer `name`."""
        return self._timers[name]

    def reset(self, name: str | None = None) -> None:
        """Reset a timer, or all of them."""
        for timer in self._timers.values() if name is None else [self._timers[name]]:
            timer.reset()

    def __iter__(self) -> Iterator[tuple[str, Timer]]:
        yield from self._timers.items()
