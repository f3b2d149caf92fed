"""What a training step leaves behind in Python: gradients, optimizer state, loss scales, flags of amp, its own tensors.

A graph computes with the tensors that were there when it was captured. `Place` is where such a tensor is found: before
a replay what is there is brought to the graph's own memory, and afterwards the graph's results are put there.
"""

from __future__ import annotations

import functools
import gc
import operator
import random
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..amp._amp_state import _amp_state
from ..ops._recording import Guard, Recording, is_number
from ..ops.multi_tensor.tables import lie_at

MISSING = object()
_STASHED = ("found_inf", "already_patched", "params_have_scaled_gradients")


class Place(NamedTuple):
    """Somewhere in Python where a step finds, changes or leaves something: an attribute, an item of a dict or list.

    What is in a `passing` place is made anew by most steps: a graph needs what was there before only if it was told so.
    One that `may_change` matters only where the step changes it. A `named` one is the function's own: a variable.
    """

    name: str
    find: Callable[[], Any]
    key: Any
    passing: bool = False
    may_change: bool = False
    named: bool = False

    def read(self) -> Any:
        """What is there, `MISSING` if nothing is."""
        owner, key = self.find(), self.key
        if isinstance(owner, dict):
            return owner.get(key, MISSING)
        if isinstance(owner, list):
            return owner[key] if key < len(owner) else MISSING
        try:
            return getattr(owner, key, MISSING)
        except ValueError:  # a variable that has no value yet
            return MISSING

    def put(self, value: Any) -> None:
        """Changes it."""
        owner = self.find()
        (operator.setitem if isinstance(owner, dict | list) else setattr)(owner, self.key, value)


def parameters(optimizers: Iterable[Any]) -> list[Tensor]:
    """Parameters that a step may change, and the half-precision ones that amp writes from them."""
    found = [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
    found += [param for optimizer in _amp_state.optimizers for param in optimizer._amp_stash.all_fp16_params]
    return list({id(param): param for param in found}.values())


def _is_leaf(tensor: Tensor) -> bool:
    """Whether a tensor gets gradients."""
    try:
        return tensor.requires_grad and tensor.is_leaf
    except RuntimeError:  # a view whose base was written to since, a tensor of torch.func that is out of use
        return False


def _places(optimizers: Sequence[Any]) -> Iterator[Place]:
    """Every place of these optimizers and of amp, and the gradients of all other tensors of the process."""
    stepped = parameters(optimizers)
    for param in stepped:
        yield Place("a gradient", lambda param=param: param, "grad", passing=True)  # type: ignore[misc]
    # An optimizer may step outside of the function, and a backward pass may come through another's parameters.
    known = set(map(id, stepped))
    for each in gc.get_objects():
        if issubclass(type(each), Tensor) and _is_leaf(each) and id(each) not in known:
            yield Place("a gradient", lambda each=each: each, "grad", passing=True, may_change=True)  # type: ignore[misc]
    for optimizer in optimizers:
        called = type(optimizer).__name__
        for param, state in optimizer.state.items():
            # `state` itself is replaced by `load_state_dict`.
            find = lambda optimizer=optimizer, param=param: optimizer.state.get(param)  # noqa: E731
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


def _host_generators() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """What reads and what sets the state of each generator of random numbers on the host."""
    yield random.getstate, random.setstate
    yield torch.get_rng_state, torch.set_rng_state
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        yield numpy.get_state, numpy.set_state


def _listed(state: Any) -> Any:
    """The state of a generator as something that compares."""
    return state.tolist() if hasattr(state, "tolist") else [*map(_listed, state)] if isinstance(state, tuple) else state


class Snapshot:
    """What there was at a time; `restore` puts it back, which undoes a capture that failed."""

    def __init__(self, optimizers: Sequence[Any], others: Iterable[Place] = (), scalers: Iterable[Any] = ()) -> None:
        self.places = [*_places(optimizers), *others]
        self.values = [place.read() for place in self.places]
        self.versions = [version_of(value) for value in self.values]
        states = [state for optimizer in optimizers for state in (optimizer.state, *optimizer.state.values())]
        self.states = [(state, dict(state)) for state in states]
        owners = (*optimizers, *(optimizer._amp_stash for optimizer in _amp_state.optimizers), *scalers)
        found = [*map(vars, owners), *(group for optimizer in optimizers for group in optimizer.param_groups)]
        for scaler in scalers:  # PyTorch's: what it knows of optimizers between `scale` and `update`
            found += [scaler._per_optimizer_states, *scaler._per_optimizer_states.values()]
        self._others = [(other, dict(other)) for other in found]
        self._random = [(read, put, read()) for read, put in _host_generators()]

    def draws_on_host(self) -> bool:
        """Whether random numbers were drawn on the host since."""
        return any(_listed(read()) != _listed(before) for read, _, before in self._random)

    def restore(self) -> None:
        """Gives everything back what it had. Values on the device were not changed by a capture."""
        for _, put, before in self._random:
            put(before)
        for entries, before in (*self._others, *self.states):
            entries.clear()
            entries.update(before)
        for place, value in zip(self.places, self.values, strict=True):
            if value is not MISSING and place.read() is not value:
                place.put(value)


class State:
    """What one graph needs from the places, and what it leaves there."""

    def __init__(self, before: Snapshot, params: list[Tensor], recording: Recording) -> None:
        if any(len(state) != len(saved) for state, saved in before.states):
            raise NotImplementedError("an optimizer made state, which every replay would make anew")
        # Each with what the graph begins with, tensors of its own or a value that must be the same (`MISSING` where it
        # does not matter), and what it ends with.
        self._places: list[tuple[Place, Any, Any]] = []
        # Ids of tensors that the function reads from variables, but does not write to: variables keep what they have.
        self._read_only: set[int] = set()
        for place, value, version in zip(before.places, before.values, before.versions, strict=True):
            after = place.read()
            is_written = version_of(after) != version
            if not place.may_change or after is not value or (place.passing and is_written):
                self._places.append((place, _need(place, value, after, recording), after))
            if place.named and not is_written:
                self._read_only.add(id(value))
        self.params = params + [place.find() for place, _, _ in self._places if place.passing and place.may_change]
        self._addresses = [param.data_ptr() for param in self.params]
        self._own = {each.data_ptr() for _, need, _ in self._places for each in _tensors(need)}
        self._moved: list[tuple[Place, Any, Any]] = []

    def is_stale(self) -> bool:
        """Whether a parameter has other memory now, so that the graph is of no use any more."""
        return not lie_at(self.params, self._addresses)

    def differs(self) -> str | None:
        """The name of a place with something that the graph cannot begin with; None if it can."""
        self._moved.clear()
        for place, need, after in self._places:
            if need is MISSING:
                continue
            found = place.read()
            if found is need:
                continue
            tensors = _tensors(need)
            if tensors and list(map(_kind, tensors)) == list(map(_kind, _tensors(found))):
                self._moved.append((place, need, found))
            elif tensors and after is not need and (place.named or place.may_change) and not place.passing:
                continue  # it is replaced by the function, and what there is now could not have been read
            elif tensors or isinstance(found, Tensor) or found != need:
                return place.name
        return None

    @torch.no_grad()
    def bring(self) -> None:
        """Brings what `differs` has found elsewhere to the graph's memory."""
        pairs = [pair for _, *both in self._moved for pair in zip(*map(_tensors, both), strict=True)]
        # What lies in the graph's memory may be written to before it is read: two that have changed places.
        sources = [found.clone() if found.data_ptr() in self._own else found for _, found in pairs]
        for (own, _), source in zip(pairs, sources, strict=True):
            own.detach().copy_(source)
        for place, need, _ in self._moved:
            if id(need) not in self._read_only:
                place.put(need)
        self._moved.clear()

    def leave(self) -> None:
        """Puts the results where a step of Python would have put them."""
        for place, need, after in self._places:
            if after is not need and after is not MISSING and place.read() is not after:
                place.put(after)


def _tensors(value: Any) -> Sequence[Tensor]:
    """A tensor, or the tensors of a tuple of nothing else; empty for everything else."""
    if isinstance(value, Tensor):
        return (value,)
    return value if holds_tensors(value) else ()


def holds_tensors(value: Any) -> bool:
    """Whether something is a tensor that is no parameter, or a tuple of such."""
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(each, Tensor) for each in value)
    return isinstance(value, Tensor) and not value.requires_grad


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def version_of(value: Any) -> int | None:
    """How often a tensor was written to."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def _need(place: Place, before: Any, after: Any, recording: Recording) -> Any:
    if isinstance(before, Tensor):
        return MISSING if place.passing and after is not before and id(before) not in recording.reads else before
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
