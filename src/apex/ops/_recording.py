"""What a captured training step must read anew at every replay: the numbers and flags that live in Python.

While `apex.graphs` captures a function, and in the eager calls before, `current` is a `Recording`. Code whose Python
numbers a graph would freeze asks it for a `Number` in their place, and says what a replay cannot find out by itself.
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

current: Recording | None = None

# Numbers of one graph, 7 for each parameter group and dtype, and bytes of tables and tickets: 1 MiB together, more than
# which PyTorch would take from a block of 20 MiB.
_MOST_NUMBERS, _MEMORY = 1 << 15, 3 << 18


class Guard(NamedTuple):
    """What Python code has decided by a number: a graph is not replayed where `now` is another `decision`."""

    number: Number
    decide: Callable[[float], Any]
    decision: Any

    @property
    def now(self) -> Any:
        return self.decide(self.number.read())


@dataclass(eq=False, slots=True)
class Number:
    """A Python number, or an expression of some, that is read again before every replay.

    It is a number on the host, `value`, until it meets a tensor: then it is a float64 on the tensor's device. Python
    code that decides by it, or makes a plain number of it, adds a `Guard`.
    """

    recording: Recording
    name: str
    value: float
    read: Callable[[], float]
    _place: Tensor | None = None

    __hash__ = None  # type: ignore[assignment]

    def on(self, device: torch.device) -> Tensor:
        """The number on a device, float64 []; the memory that every replay writes it to."""
        if self._place is None:
            self._place = self.recording.place(self, device)
        return self._place

    def map(self, function: Callable[..., Any], *others: Any) -> Number:
        """`function` of this number and others, on the host."""
        values = [each.value if isinstance(each, Number) else each for each in others]

        def read() -> Any:
            return function(self.read(), *(each.read() if isinstance(each, Number) else each for each in others))

        return Number(self.recording, self.name, function(self.value, *values), read)

    def _decides(self, decide: Callable[[Any], Any]) -> Any:
        decision = decide(self.value)
        self.recording.guards.append(Guard(self, decide, decision))
        return decision

    def _compare(self, compare: Callable[[Any, Any], Any], other: Any) -> Any:
        found = self._combine(compare, other)
        return bool(found) if isinstance(found, Number) else found

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


class Recording:
    """What is noted while a function is captured; where `captures` is False, a rehearsal, it is used and forgotten."""

    def __init__(self, captures: bool, device: torch.device) -> None:
        self.captures = captures
        self.guards: list[Guard] = []
        # Tensors that the graph has the addresses of.
        self.kept: list[Any] = []
        # What is to be done after a replay.
        self.after: list[Callable[[], None]] = []
        # What is to be done once, before the first replay: the contents of `memory` that no replay changes.
        self.once: list[Callable[[], Any]] = []
        # Tickets of kernels (see `_partial_sums`), by the stream of their launches.
        self.tickets: dict[int, Tensor | None] = {}
        # Hyperparameters that are read anew: id of the optimizer, index of the group, name. The others are frozen.
        self.followed: set[tuple[int, int, str]] = set()
        # How often groups of optimizers were stepped, by optimizer and index.
        self._steps: dict[tuple[Any, int], int] = {}
        # Ids of tensors that the graph reads although something else may take their place before it ends.
        self.reads: set[int] = set()
        self.numbers: list[Number] = []
        self._places: Tensor | None = None
        if captures:
            self._places = torch.zeros(_MOST_NUMBERS + _MEMORY // 8, dtype=torch.float64, device=device)
        self._taken = _MOST_NUMBERS

    def place(self, number: Number, device: torch.device) -> Tensor:
        """Where a number is on the device."""
        if self._places is None:
            return torch.full((), number.value, dtype=torch.float64, device=device)
        if device != self._places.device:
            raise RuntimeError(f"a graph of {self._places.device} cannot read {number.name} on {device}")
        self.numbers.append(number)
        return self._places[:_MOST_NUMBERS][len(self.numbers) - 1]

    def memory(self, count: int, dtype: torch.dtype) -> Tensor | None:
        """`count` zeros outside of the graph's pool, where replays write elsewhere too.

        None where no more is left, and on a stream that is not captured.
        """
        first = self._taken
        end = first + -(-count * dtype.itemsize // 16) * 2
        if self._places is None or end > self._places.numel() or not torch.cuda.is_current_stream_capturing():
            return None
        self._taken = end
        return self._places[first:end].view(dtype)[:count]

    def counted(self, optimizer: Any, index: int) -> Any:
        """The step count of a parameter group that has just been counted up in `group["step"]`."""
        group, key = optimizer.param_groups[index], (optimizer, index)
        more = self._steps[key] = self._steps.get(key, 0) + 1

        def count() -> None:
            optimizer.param_groups[index]["step"] += 1

        self.after.insert(0, count)  # also where a message about overflows is an error
        # A replay reads it before it counts the step.
        read = lambda: optimizer.param_groups[index]["step"] + more  # noqa: E731
        return Number(self, f"{type(optimizer).__name__}.param_groups[{index}]['step']", group["step"], read)

    def group(self, optimizer: Any, index: int) -> dict[str, Any]:
        """A parameter group, each entry of it as `entry` returns it."""
        return {name: self.entry(optimizer, index, name) for name in optimizer.param_groups[index]}

    def entry(self, optimizer: Any, index: int, name: str) -> Any:
        """An entry of a parameter group: a `Number` in place of a number, else itself."""
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
        """A number that is the same at every replay, whatever is in its place then."""
        return Number(self, "a constant", value, lambda: value)

    def upload(self) -> None:
        """Gives the graph its numbers as they are now."""
        for action in self.once:
            action()
        self.once.clear()
        if self._places is None or not self.numbers:
            return
        values = [float(number.read()) for number in self.numbers]
        # Pinned memory of its own: an earlier replay's may not have been read yet.
        host = torch.tensor(values, dtype=torch.float64, device="cpu", pin_memory=not self._places.is_cpu)
        self._places[: len(values)].copy_(host, non_blocking=True)


def is_number(value: Any) -> bool:
    """Whether something is a Python number, and no flag."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@contextlib.contextmanager
def active(recording: Recording) -> Iterator[None]:
    """Makes a recording the current one."""
    global current
    previous, current = current, recording
    try:
        yield
    finally:
        current = previous


def capturing() -> Recording | None:
    """The recording of a function that is being captured by `apex.graphs`; None otherwise, and in a rehearsal."""
    return current if current is not None and current.captures else None


def lifted(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """`function` of numbers; of a `Number`, a `Number`."""
    return first.map(function, *others) if isinstance(first, Number) else function(first, *others)
