"""What a training step leaves behind in Python: gradients, optimizer state, loss scales, and the flags of amp.

A graph computes with the tensors that were there when it was captured. `Place` is where such a tensor is found: before
a replay what is there is brought to the graph's own memory, and afterwards the graph's results are put there.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..amp._amp_state import _amp_state
from ..ops._recording import Guard, Recording, is_number
from ..ops.multi_tensor.tables import lie_at

_MISSING = object()


class Place:
    """Somewhere in Python where a step finds, changes or leaves something.

    What is in a `passing` place is made anew by most steps: a graph needs what was there before only if it was told so.
    `quick` reads it in a tenth of a microsecond, as long as no dict of an optimizer's state is replaced.
    """

    __slots__ = ("get", "name", "passing", "put", "quick")

    def __init__(
        self,
        name: str,
        get: Callable[[], Any],
        put: Callable[[Any], None],
        passing: bool = False,
        quick: Callable[[], Any] | None = None,
    ) -> None:
        self.name = name
        self.get = get
        self.put = put
        self.passing = passing
        self.quick = quick or get

    def read(self) -> Any:
        """What is there."""
        try:
            return self.get()
        except (AttributeError, IndexError, KeyError):
            return _MISSING


def _attribute(owner: Any, name: str, passing: bool = False) -> Place:
    called = f"{type(owner).__name__}.{name}"
    return Place(called, functools.partial(getattr, owner, name), functools.partial(setattr, owner, name), passing)


def _item(name: str, mapping: Callable[[], Any], key: Any, quick: Callable[[], Any] | None = None) -> Place:
    put = lambda value: operator.setitem(mapping(), key, value)  # noqa: E731
    return Place(name, lambda: mapping()[key], put, quick=quick)


def parameters(optimizers: Iterable[Any]) -> list[Tensor]:
    """Parameters that a step may change, and the half-precision ones that amp writes from them."""
    found = [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
    found += [param for optimizer in _amp_state.optimizers for param in optimizer._amp_stash.all_fp16_params]
    return list({id(param): param for param in found}.values())


def places(optimizers: Sequence[Any]) -> list[Place]:
    """Every place of these optimizers and of amp."""
    found = [_attribute(param, "grad", passing=True) for param in parameters(optimizers)]
    for optimizer in optimizers:
        found += _of_optimizer(optimizer)
    for optimizer in _amp_state.optimizers:
        stash = optimizer._amp_stash
        found += [_attribute(stash, name) for name in ("found_inf", "already_patched", "params_have_scaled_gradients")]
    for scaler in _amp_state.loss_scalers:
        found += [_attribute(scaler, name, passing=name == "_overflow_buf") for name in vars(scaler)]
    return found


def _of_optimizer(optimizer: Any) -> Iterator[Place]:
    called = type(optimizer).__name__
    for param, state in optimizer.state.items():
        if isinstance(state, dict):
            find = functools.partial(_state_of, optimizer, param)
            for name in state:
                quick = functools.partial(state.__getitem__, name)
                yield _item(f"the state {name!r} of {called}", find, name, quick)
    for index, group in enumerate(optimizer.param_groups):
        if isinstance(group.get("step"), Tensor):
            find = functools.partial(_group, optimizer, index)
            yield _item(f"the step count of {called}", find, "step")
    for name in ("most_recent_scale", "scale_set_by_backward"):
        if hasattr(optimizer, name):
            yield _attribute(optimizer, name)
    for index in getattr(optimizer, "_skipped", ()):
        yield _item(f"the skipped steps of {called}", lambda: optimizer._skipped, index)


def _group(optimizer: Any, index: int) -> dict[str, Any]:
    return optimizer.param_groups[index]


def _state_of(optimizer: Any, param: Tensor) -> dict[str, Any]:
    return optimizer.state.get(param, {})  # `state` itself is replaced by `load_state_dict`


class Snapshot:
    """What was in places at a time; `restore` puts it back, which undoes a capture that failed."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.places = places(optimizers)
        self.values = [place.read() for place in self.places]
        self._groups = [(optimizer, [dict(group) for group in optimizer.param_groups]) for optimizer in optimizers]
        self._states = [
            (optimizer, {param: (state, dict(state)) for param, state in optimizer.state.items()})
            for optimizer in optimizers
        ]
        self._attributes = [(each, dict(vars(each))) for each in (*optimizers, *_amp_stashes())]

    def made_state(self) -> bool:
        """Whether an optimizer has more state now than it had."""
        return any(
            len(optimizer.state) != len(states) or any(len(state) != len(before) for state, before in states.values())
            for optimizer, states in self._states
        )

    def restore(self) -> None:
        """Gives every place back what it had. Values on the device were not changed by a capture."""
        for each, attributes in self._attributes:
            vars(each).clear()
            vars(each).update(attributes)
        for optimizer, groups in self._groups:
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(before)
        for optimizer, states in self._states:
            optimizer.state.clear()
            for param, (state, before) in states.items():
                state.clear()
                state.update(before)
                optimizer.state[param] = state
        for place, value in zip(self.places, self.values, strict=True):
            if value is not _MISSING and place.read() is not value:
                place.put(value)


def _amp_stashes() -> list[Any]:
    return [optimizer._amp_stash for optimizer in _amp_state.optimizers]


class State:
    """What one graph needs from the places, and what it leaves there."""

    def __init__(self, before: Snapshot, optimizers: Sequence[Any], recording: Recording) -> None:
        if before.made_state():
            raise NotImplementedError("an optimizer made state, which every replay would make anew")
        self._places = before.places
        self._quick = [place.quick for place in before.places]
        self._states = [(optimizer, list(optimizer.state.values())) for optimizer in optimizers]
        self._params = parameters(optimizers)
        self._addresses = [param.data_ptr() for param in self._params]
        self._after = [place.read() for place in self._places]
        # Tensors of the graph, or values that must be the same; `_ANY` where it does not matter what is there.
        self._needed = [
            self._need(place, value, after, recording)
            for place, value, after in zip(before.places, before.values, self._after, strict=True)
        ]
        self._repeats = all(
            need is _ANY or need is after for need, after in zip(self._needed, self._after, strict=True)
        )

    @staticmethod
    def _need(place: Place, before: Any, after: Any, recording: Recording) -> Any:
        if isinstance(before, Tensor):
            return _ANY if place.passing and after is not before and not recording.has_read(before) else before
        if is_number(before) and is_number(after) and before != after:
            raise NotImplementedError(f"{place.name} is a Python number that every step changes, from {before}")
        return before

    def is_stale(self) -> bool:
        """Whether a parameter has other memory now, so that the graph is of no use any more."""
        return not lie_at(self._params, self._addresses)

    def is_as_left(self) -> bool:
        """Whether everything is as this graph left it, and it can begin with that."""
        if not self._repeats:
            return False
        for optimizer, states in self._states:
            if len(optimizer.state) != len(states) or not all(map(operator.is_, optimizer.state.values(), states)):
                return False
        try:
            return all(map(operator.is_, [read() for read in self._quick], self._after))
        except (AttributeError, IndexError, KeyError):
            return False

    def differs(self) -> str | None:
        """The name of a place with something that the graph cannot begin with; None if it can."""
        for place, need in zip(self._places, self._needed, strict=True):
            if need is _ANY:
                continue
            found = place.read()
            if found is need:
                continue
            fits = (
                isinstance(found, Tensor) and (found.shape, found.dtype, found.device) == _kind(need)
                if isinstance(need, Tensor)
                else not isinstance(found, Tensor) and found == need
            )
            if not fits:
                return place.name
        return None

    @torch.no_grad()
    def bring(self) -> None:
        """Brings what is in the places to the graph's memory."""
        for place, need in zip(self._places, self._needed, strict=True):
            if isinstance(need, Tensor):
                found = place.read()
                if found is not need:
                    need.detach().copy_(found)
                    place.put(need)

    def leave(self) -> None:
        """Puts the results where a step of Python would have put them."""
        for place, after in zip(self._places, self._after, strict=True):
            if after is not _MISSING and place.read() is not after:
                place.put(after)


_ANY = object()


def _kind(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def hyperparameters(optimizers: Iterable[Any]) -> list[Guard]:
    """Every hyperparameter by its name, as it is now."""
    guards = []
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name not in ("params", "step") and not isinstance(value, Tensor):
                    read = lambda optimizer=optimizer, index=index, name=name: optimizer.param_groups[index][name]  # noqa: E731
                    guards.append(Guard(f"{type(optimizer).__name__}.param_groups[{index}][{name!r}]", read, value))
    return guards
