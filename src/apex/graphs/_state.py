"""What a training step leaves behind in Python: gradients, optimizer state, loss scales, and the flags of amp.

A graph computes with the tensors that were there when it was captured. `Place` is where such a tensor is found: before
a replay what is there is brought to the graph's own memory, and afterwards the graph's results are put there.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..amp._amp_state import _amp_state
from ..ops._recording import Guard, Recording, is_number
from ..ops.multi_tensor.tables import lie_at

_MISSING = object()
_STASHED = ("found_inf", "already_patched", "params_have_scaled_gradients")


class Place(NamedTuple):
    """Somewhere in Python where a step finds, changes or leaves something: an attribute, or an item of a dict.

    What is in a `passing` place is made anew by most steps: a graph needs what was there before only if it was told so.
    """

    name: str
    find: Callable[[], Any]
    key: Any
    passing: bool = False

    def read(self) -> Any:
        """What is there."""
        owner = self.find()
        return owner.get(self.key, _MISSING) if isinstance(owner, dict) else getattr(owner, self.key, _MISSING)

    def put(self, value: Any) -> None:
        """Changes it."""
        owner = self.find()
        (operator.setitem if isinstance(owner, dict) else setattr)(owner, self.key, value)


def parameters(optimizers: Iterable[Any]) -> list[Tensor]:
    """Parameters that a step may change, and the half-precision ones that amp writes from them."""
    found = [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
    found += [param for optimizer in _amp_state.optimizers for param in optimizer._amp_stash.all_fp16_params]
    return list({id(param): param for param in found}.values())


def _places(optimizers: Sequence[Any]) -> Iterator[Place]:
    """Every place of these optimizers and of amp."""
    for param in parameters(optimizers):
        yield Place("a gradient", lambda param=param: param, "grad", passing=True)  # type: ignore[misc]
    for optimizer in optimizers:
        called = type(optimizer).__name__
        for param, state in optimizer.state.items():
            # `state` itself is replaced by `load_state_dict`.
            find = lambda optimizer=optimizer, param=param: optimizer.state.get(param, {})  # noqa: E731
            yield from (Place(f"the state {name!r} of {called}", find, name) for name in state)
        for index, group in enumerate(optimizer.param_groups):
            if isinstance(group.get("step"), Tensor):
                find = lambda optimizer=optimizer, index=index: optimizer.param_groups[index]  # noqa: E731
                yield Place(f"the step count of {called}", find, "step")
        for name in ("most_recent_scale", "scale_set_by_backward"):
            if hasattr(optimizer, name):
                yield Place(f"{called}.{name}", lambda optimizer=optimizer: optimizer, name)  # type: ignore[misc]
        for index in getattr(optimizer, "_skipped", ()):
            find = functools.partial(getattr, optimizer, "_skipped")
            yield Place(f"the skipped steps of {called}", find, index)
    for optimizer in _amp_state.optimizers:
        find = functools.partial(getattr, optimizer, "_amp_stash")
        yield from (Place(f"amp's {name}", find, name) for name in _STASHED)
    for scaler in _amp_state.loss_scalers:
        for name in vars(scaler):
            yield Place(f"LossScaler.{name}", lambda scaler=scaler: scaler, name, name == "_overflow_buf")  # type: ignore[misc]


class Snapshot:
    """What there was at a time; `restore` puts it back, which undoes a capture that failed."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.places = list(_places(optimizers))
        self.values = [place.read() for place in self.places]
        states = [state for optimizer in optimizers for state in (optimizer.state, *optimizer.state.values())]
        self.states = [(state, dict(state)) for state in states]
        owners = (*optimizers, *(optimizer._amp_stash for optimizer in _amp_state.optimizers))
        others = [*map(vars, owners), *(group for optimizer in optimizers for group in optimizer.param_groups)]
        self._others = [(other, dict(other)) for other in others]

    def restore(self) -> None:
        """Gives everything back what it had. Values on the device were not changed by a capture."""
        for entries, before in (*self._others, *self.states):
            entries.clear()
            entries.update(before)
        for place, value in zip(self.places, self.values, strict=True):
            if value is not _MISSING and place.read() is not value:
                place.put(value)


class State:
    """What one graph needs from the places, and what it leaves there."""

    def __init__(self, before: Snapshot, optimizers: Sequence[Any], recording: Recording) -> None:
        if any(len(state) != len(saved) for state, saved in before.states):
            raise NotImplementedError("an optimizer made state, which every replay would make anew")
        self._params = parameters(optimizers)
        self._addresses = [param.data_ptr() for param in self._params]
        # Each with what the graph begins with, a tensor of its own or a value that must be the same (`_MISSING` where
        # it does not matter), and what it ends with.
        self._places = [
            (place, _need(place, value, place.read(), recording), place.read())
            for place, value in zip(before.places, before.values, strict=True)
        ]
        self._moved: list[tuple[Place, Tensor, Tensor]] = []

    def is_stale(self) -> bool:
        """Whether a parameter has other memory now, so that the graph is of no use any more."""
        return not lie_at(self._params, self._addresses)

    def differs(self) -> str | None:
        """The name of a place with something that the graph cannot begin with; None if it can."""
        self._moved.clear()
        for place, need, _ in self._places:
            if need is _MISSING:
                continue
            found = place.read()
            if found is need:
                continue
            if isinstance(need, Tensor):
                kind = ("shape", "dtype", "device")
                if not isinstance(found, Tensor) or any(getattr(found, key) != getattr(need, key) for key in kind):
                    return place.name
                self._moved.append((place, need, found))
            elif isinstance(found, Tensor) or found != need:
                return place.name
        return None

    @torch.no_grad()
    def bring(self) -> None:
        """Brings what `differs` has found elsewhere to the graph's memory."""
        for place, need, found in self._moved:
            need.detach().copy_(found)
            place.put(need)
        self._moved.clear()

    def leave(self) -> None:
        """Puts the results where a step of Python would have put them."""
        for place, need, after in self._places:
            if after is not need and after is not _MISSING and place.read() is not after:
                place.put(after)


def _need(place: Place, before: Any, after: Any, recording: Recording) -> Any:
    if isinstance(before, Tensor):
        return _MISSING if place.passing and after is not before and id(before) not in recording.reads else before
    if is_number(before) and is_number(after) and before != after:
        raise NotImplementedError(f"{place.name} is a Python number that every step changes, from {before}")
    return before


def hyperparameters(optimizers: Iterable[Any], but: Container[int] = ()) -> list[Guard]:
    """Every hyperparameter by its name, as it is now; `but` are ids of optimizers to leave out."""
    return [
        Guard(
            f"{type(optimizer).__name__}.param_groups[{index}][{name!r}]",
            lambda optimizer=optimizer, index=index, name=name: optimizer.param_groups[index][name],  # type: ignore[misc]
            value,
        )
        for optimizer in optimizers
        if id(optimizer) not in but
        for index, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in ("params", "step") and not isinstance(value, Tensor)
    ]
