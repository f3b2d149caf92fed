"""What a graph needs from Python before a replay, and what it leaves there.

A graph computes with the tensors that were there when it was captured. Before a replay, what is in their places now is
copied into them; after it the graph's results are put there, as the function itself would have done.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..amp._amp_state import _amp_state
from ..ops._recording import Recording, is_number
from ..ops.multi_tensor.tables import lie_at
from ._places import MISSING, Place, holds_tensors, parameters, training_places
from ._references import References


def _dicts(value: Any) -> Iterator[dict[Any, Any]]:
    """A dict, and the dicts inside of it and of its lists."""
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _dicts(part)


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
    """What there was before a capture, which `restore` puts back."""

    def __init__(self, optimizers: Sequence[Any], references: References) -> None:
        self.params = [*parameters(optimizers), *references.parameters()]
        self.found = [(place, place.read()) for place in (*training_places(optimizers), *references.places())]
        self.versions = [version_of(value) for _, value in self.found]
        owners = (*optimizers, *(optimizer._amp_stash for optimizer in _amp_state.optimizers), *references.scalers)
        self._dicts = [(each, dict(each)) for owner in owners for each in _dicts(vars(owner))]
        self._sizes = [(each, len(each)) for optimizer in optimizers for each in _dicts(optimizer.state)]
        self._random = [(get, put, get()) for get, put in _host_generators()]

    def check(self) -> None:
        """Raises for what the host has done since, and would not do at a replay."""
        if any(len(entries) != size for entries, size in self._sizes):
            raise NotImplementedError("an optimizer made state, which every replay would make anew")
        if any(_listed(get()) != _listed(before) for get, _, before in self._random):
            raise NotImplementedError(
                "random numbers are drawn on the host, which a graph would freeze; draw them on the device"
            )

    def restore(self) -> None:
        """Gives everything back what it had. Values on the device were not changed by a capture."""
        for _, put, before in self._random:
            put(before)
        for entries, before in self._dicts:
            entries.clear()
            entries.update(before)
        for place, value in self.found:
            if value is not MISSING and place.read() is not value:
                place.put(value)


class State:
    """What one graph needs in the places, and what it leaves there."""

    def __init__(self, before: Snapshot, recording: Recording) -> None:
        before.check()
        self.params = list(before.params)
        # What the graph begins with: tensors of its own, or a value that must be the same; and whether it may write to
        # these, so that they must be in the place, too.
        self._needs: list[tuple[Place, Any, bool]] = []
        self._results: list[tuple[Place, Any]] = []
        for (place, value), version in zip(before.found, before.versions, strict=True):
            after = place.read()
            is_written, is_replaced = version_of(after) != version, after is not value
            if place.optional and not is_replaced and not (place.temporary and is_written):
                continue
            if is_number(value) and is_number(after) and value != after:
                raise NotImplementedError(f"{place.name} is a Python number that every step changes, from {value}")
            if place.optional and place.temporary:
                self.params.append(place.root)
            if is_replaced and after is not MISSING:
                self._results.append((place, after))
                if place.temporary and isinstance(value, Tensor) and id(value) not in recording.reads:
                    continue
            if value is not MISSING:
                self._needs.append((place, value, is_written or not place.variable))
        self._addresses = [param.data_ptr() for param in self.params]

    def is_stale(self) -> bool:
        """Whether a parameter has other memory now, so that the graph is of no use any more."""
        return not lie_at(self.params, self._addresses)

    @torch.no_grad()
    def bring(self) -> str | None:
        """Copies what is elsewhere to the graph's memory; or returns the name of what it cannot begin with."""
        moved = []
        for place, need, is_changed in self._needs:
            found = place.read()
            if found is need:
                continue
            if _kinds(need) and _kinds(found) == _kinds(need):
                moved.append((place, need, found, is_changed))
            elif _tensors(need) or _tensors(found) or found != need:
                return place.name
        # Two may have changed places: all are read before one is written to.
        sources = [[tensor.clone() for tensor in _tensors(found)] for _, _, found, _ in moved]
        for (place, need, _, is_changed), values in zip(moved, sources, strict=True):
            for own, value in zip(_tensors(need), values, strict=True):
                own.detach().copy_(value)
            if is_changed:
                place.put(need)
        return None

    def leave(self) -> None:
        """Puts the results where a step of Python would have put them."""
        for place, after in self._results:
            if place.read() is not after:
                place.put(after)


def _tensors(value: Any) -> Sequence[Tensor]:
    """A tensor, or the tensors of a tuple of nothing else; empty for everything else."""
    if isinstance(value, Tensor):
        return (value,)
    return value if holds_tensors(value) else ()


def _kinds(value: Any) -> list[Any]:
    return [(tensor.shape, tensor.dtype, tensor.device) for tensor in _tensors(value)]


def version_of(value: Any) -> int | None:
    """How often a tensor was written to."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None
