"""Python numbers and flags that a captured training step must read again at every replay.

While `apex.graphs` captures a function, and in the eager calls before, `current` is a `CaptureContext`. Code whose
Python numbers a graph would freeze asks it for a `Number`, and registers the work that a replay must do in Python.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

current: CaptureContext | None = None

# Most numbers of one graph (7 for each parameter group and dtype) and bytes for tables and tickets. Together 1 MiB: for
# a larger allocation PyTorch would take a block of 20 MiB.
_MOST_NUMBERS, _MEMORY = 1 << 15, 3 << 18


class Guard(NamedTuple):
    """A decision that Python code based on a number: a graph is not replayed if `now` differs from `decision`."""

    number: Number
    decide: Callable[[float], Any]
    decision: Any

    @property
    def now(self) -> Any:
        return self.decide(self.number.read())


@dataclass(eq=False, slots=True)
class Number:
    """A Python number, or an expression of Python numbers, that is read again before every replay.

    It is a number on the host, `value`, until it is combined with a tensor: then it is a float64 on the tensor's
    device. Python code that branches on it, or converts it to a plain number, adds a `Guard`.
    """

    capture: CaptureContext
    name: str
    value: float
    read: Callable[[], float]
    _device_value: Tensor | None = None

    __hash__ = None  # type: ignore[assignment]

    def on(self, device: torch.device) -> Tensor:
        """Return the number as a float64 scalar on a device, in memory that every replay updates."""
        if self._device_value is None:
            self._device_value = self.capture.device_value(self, device)
        return self._device_value

    def map(self, function: Callable[..., Any], *others: Any) -> Number:
        """Return `function` of this number and `others` as a `Number` on the host."""
        values = [each.value if isinstance(each, Number) else each for each in others]

        def read() -> Any:
            return function(self.read(), *(each.read() if isinstance(each, Number) else each for each in others))

        return Number(self.capture, self.name, function(self.value, *values), read)

    def _decides(self, decide: Callable[[Any], Any]) -> Any:
        decision = decide(self.value)
        self.capture.guards.append(Guard(self, decide, decision))
        return decision

    def _compare(self, compare: Callable[[Any, Any], Any], other: Any) -> Any:
        result = self._combine(compare, other)
        return bool(result) if isinstance(result, Number) else result

    def _combine(self, combine: Callable[[Any, Any], Any], other: Any) -> Any:
        return combine(self.on(other.device), other) if isinstance(other, Tensor) else self.map(combine, other)


for _type in (bool, float, int):
    setattr(Number, f"__{_type.__name__}__", functools.partialmethod(Number._decides, _type))
for _name in ("add", "sub", "mul", "truediv", "pow"):
    _combine = getattr(operator, _name)
    _swapped = lambda one, other, combine=_combine: combine(other, one)  # noqa: E731
    setattr(Number, f"__{_name}__", functools.partialmethod(Number._combine, _combine))
    setattr(Number, f"__r{_name}__", functools.partialmethod(Number._combine, _swapped))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Number, f"__{_name}__", functools.partialmethod(Number._compare, getattr(operator, _name)))


class CaptureContext:
    """Notes made while a function is captured. If `captures` is False this is a rehearsal, and they are dropped."""

    def __init__(self, captures: bool, device: torch.device) -> None:
        self.captures = captures
        self.guards: list[Guard] = []
        # Tensors whose addresses the graph contains.
        self.kept: list[Any] = []
        # Actions after every replay.
        self.after: list[Callable[[], None]] = []
        # Actions before the first replay only: they fill the parts of `memory` that no replay changes.
        self.once: list[Callable[[], Any]] = []
        # Tickets of kernels (see `_tickets`), by the stream of their launches.
        self.tickets: dict[int, Tensor | None] = {}
        # Hyperparameters that are read again: id of the optimizer, index of the group, name. The others are frozen.
        self.followed: set[tuple[int, int, str]] = set()
        # Steps taken of each parameter group, by optimizer and index.
        self._steps: dict[tuple[Any, int], int] = {}
        # Ids of tensors that the graph reads although another tensor may replace them before it ends.
        self.reads: set[int] = set()
        self.numbers: list[Number] = []
        self._buffer: Tensor | None = None
        if captures:
            self._buffer = torch.zeros(_MOST_NUMBERS + _MEMORY // 8, dtype=torch.float64, device=device)
        self._taken = _MOST_NUMBERS

    def device_value(self, number: Number, device: torch.device) -> Tensor:
        """Return a tensor on the device with a number's value; replays of a captured graph read it there."""
        if self._buffer is None:
            return torch.full((), number.value, dtype=torch.float64, device=device)
        if device != self._buffer.device:
            raise RuntimeError(f"a graph of {self._buffer.device} cannot read {number.name} on {device}")
        self.numbers.append(number)
        return self._buffer[:_MOST_NUMBERS][len(self.numbers) - 1]

    def memory(self, count: int, dtype: torch.dtype) -> Tensor | None:
        """Return `count` zeros outside of the graph's pool, whose memory replays reuse for other tensors.

        Return None if the memory is used up, or if the current stream is not captured.
        """
        first = self._taken
        end = first + -(-count * dtype.itemsize // 16) * 2
        if self._buffer is None or end > self._buffer.numel() or not torch.cuda.is_current_stream_capturing():
            return None
        self._taken = end
        return self._buffer[first:end].view(dtype)[:count]

    def counted(self, optimizer: Any, index: int) -> Any:
        """Return the step count of a parameter group whose `group["step"]` has just been incremented, as a `Number`."""
        group, key = optimizer.param_groups[index], (optimizer, index)
        more = self._steps[key] = self._steps.get(key, 0) + 1

        def count() -> None:
            optimizer.param_groups[index]["step"] += 1

        self.after.insert(0, count)  # first, because a later action may raise: a message about overflows as an error
        # A replay reads the count before it increments it.
        read = lambda: optimizer.param_groups[index]["step"] + more  # noqa: E731
        return Number(self, f"{type(optimizer).__name__}.param_groups[{index}]['step']", group["step"], read)

    def group(self, optimizer: Any, index: int) -> dict[str, Any]:
        """Return a copy of a parameter group with each value replaced by `entry`."""
        return {name: self.entry(optimizer, index, name) for name in optimizer.param_groups[index]}

    def entry(self, optimizer: Any, index: int, name: str) -> Any:
        """Return an entry of a parameter group, with a `Number` in place of each Python number."""
        value = optimizer.param_groups[index][name]
        parts = value if isinstance(value, tuple | list) else (value,)
        on_host = (is_number(each) or (isinstance(each, Tensor) and each.is_cpu) for each in parts)
        if name in ("params", "step") or not all(on_host):
            return value
        self.followed.add((id(optimizer), index, name))
        called = f"{type(optimizer).__name__}.param_groups[{index}][{name!r}]"
        read = lambda: optimizer.param_groups[index][name]  # noqa: E731
        if parts is not value:
            return Number(self, called, float(value), lambda: float(read()))
        return tuple(Number(self, called, float(each), lambda i=i: float(read()[i])) for i, each in enumerate(parts))  # type: ignore[misc]

    def constant(self, value: float) -> Number:
        """Return a `Number` with the same value at every replay."""
        return Number(self, "a constant", value, lambda: value)

    def upload(self) -> None:
        """Copy the current values of all numbers to the graph's memory."""
        for action in self.once:
            action()
        self.once.clear()
        if self._buffer is None or not self.numbers:
            return
        values = [float(number.read()) for number in self.numbers]
        # Fresh pinned memory, because the device may not have read an earlier replay's copy yet.
        host = torch.tensor(values, dtype=torch.float64, device="cpu", pin_memory=not self._buffer.is_cpu)
        self._buffer[: len(values)].copy_(host, non_blocking=True)


def is_number(value: Any) -> bool:
    """Return whether a value is a Python int or float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@contextlib.contextmanager
def active(capture: CaptureContext) -> Iterator[None]:
    """Make `capture` the current capture inside the block."""
    global current
    previous, current = current, capture
    try:
        yield
    finally:
        current = previous


def capturing() -> CaptureContext | None:
    """Return the capture of the function that `apex.graphs` captures now; None otherwise and in a rehearsal."""
    return current if current is not None and current.captures else None


def lifted(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Return `function` of plain numbers, or a `Number` if the first argument is one."""
    return first.map(function, *others) if isinstance(first, Number) else function(first, *others)
