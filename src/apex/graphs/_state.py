"""What a training step finds and leaves in Python: gradients, optimizer state, loss scales, tensors in its variables.

A graph computes with the tensors that were there when it was captured. Before a replay, what is in their places now is
copied into them; after it the graph's results are put there, as the function itself would have done.
"""

from __future__ import annotations

import gc
import itertools
import operator
import random
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..amp._amp_state import _amp_state
from ..ops._host import HOST, on_host
from ..ops._recording import Recording, is_number
from ..ops.multi_tensor.tables import lie_at
from ._place import CONTENTS, MISSING, Place, version_of
from ._references import References

_FEW_NUMBERS = 64


def parameters(optimizers: Iterable[Any], others: Iterable[Tensor] = ()) -> list[Tensor]:
    """Parameters that a step may change, the half-precision ones that amp writes from them, and others."""
    found = [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
    found += [param for optimizer in _amp_state.optimizers for param in optimizer._amp_stash.all_fp16_params]
    return list({id(param): param for param in (*found, *others)}.values())


def hyperparameters(optimizers: Sequence[Any]) -> list[Place]:
    """Numbers, flags and tensors in parameter groups, but for counts on the host; and defaults that are no tensors."""
    found = []
    for optimizer in optimizers:
        names = [name for name, value in optimizer.defaults.items() if not isinstance(value, Tensor)]
        found += [Place.of(optimizer, "defaults", name) for name in names]
        for index, group in enumerate(optimizer.param_groups):
            names = [name for name in group if name != "params" and (name != "step" or isinstance(group[name], Tensor))]
            found += [Place.of(optimizer, "param_groups", index, name) for name in names]
    return found


def _training_places(optimizers: Sequence[Any]) -> list[Place]:
    """Every place of these optimizers and of amp, and the gradients of all tensors of the process."""
    stepped = {id(param): param for param in parameters(optimizers)}
    found = hyperparameters(optimizers)
    found += [Place.of(param, "grad", temporary=True) for param in stepped.values()]
    # An optimizer may step outside of the function, and a backward pass may come through another's parameters.
    leaves = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and _is_leaf(each)]
    found += [Place.of(leaf, "grad", temporary=True, optional=True) for leaf in leaves if id(leaf) not in stepped]
    for optimizer in optimizers:
        found += [
            Place.of(optimizer, "state", param, name) for param in optimizer.state for name in optimizer.state[param]
        ]
        found += [Place.of(optimizer, name) for name in ("most_recent_scale", "scale_set_by_backward")]
        found.append(Place.of(optimizer, "param_groups", len))
        for index in range(len(optimizer.param_groups)):
            found += [Place.of(optimizer, "_skipped", index), Place.of(optimizer, "param_groups", index, "params", len)]
    for optimizer in _amp_state.optimizers:
        found += [
            Place.of(optimizer._amp_stash, name)
            for name in ("found_inf", "already_patched", "params_have_scaled_gradients")
        ]
    for scaler in _amp_state.loss_scalers:
        found += [Place.of(scaler, name, temporary=name == "_overflow_buf") for name in vars(scaler)]
    return found


def _is_leaf(tensor: Tensor) -> bool:
    """Whether a tensor gets gradients."""
    try:
        return tensor.requires_grad and tensor.is_leaf
    except RuntimeError:  # a view whose base was written to since, a tensor of torch.func that is out of use
        return False


def _dicts(value: Any) -> Iterator[dict[Any, Any]]:
    """A dict, and the dicts inside of it and of its lists."""
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _dicts(part)


def _generator_states(others: Iterable[Any]) -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """What reads and what sets the state of each generator on the host: those that everyone uses, and others."""
    for each in (random, torch.default_generator, getattr(sys.modules.get("numpy"), "random", random), *others):
        if hasattr(each, "getstate"):
            yield each.getstate, each.setstate
        elif hasattr(each, "get_state"):
            yield each.get_state, each.set_state
        elif hasattr(each, "bit_generator"):
            place = Place("", each.bit_generator, ("state",))
            yield place.read, place.put


def _listed(state: Any) -> Any:
    """The state of a generator as something that compares."""
    if isinstance(state, tuple | dict):
        return [*map(_listed, state.values() if isinstance(state, dict) else state)]
    return state.tolist() if hasattr(state, "tolist") else state


def _with_value(place: Place, device: torch.device) -> tuple[Place, Any]:
    """A place and what is there; of a few numbers on the host, which a graph of another device freezes, these."""
    value = place.read()
    if isinstance(value, Tensor) and on_host(value) and device != HOST and 0 < value.numel() <= _FEW_NUMBERS:
        place = place._replace(path=(*place.path, CONTENTS))
        return place, place.read()
    return place, value


class Snapshot:
    """What there was before a capture, which `restore` puts back."""

    def __init__(self, optimizers: Sequence[Any], references: References, device: torch.device) -> None:
        self.optimizers, self.references = optimizers, references
        self.found = [_with_value(place, device) for place in (*_training_places(optimizers), *references.places())]
        self.versions = [version_of(value) for _, value in self.found]
        stashes = (optimizer._amp_stash for optimizer in _amp_state.optimizers)
        owners = (*optimizers, *stashes, *references.scalers)
        self._dicts = [(each, dict(each)) for owner in owners for each in _dicts(vars(owner))]
        self._sizes = [(each, len(each)) for optimizer in optimizers for each in _dicts(optimizer.state)]
        self._random = [(get, put, get()) for get, put in _generator_states(references.generators)]

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
            is_there = place.has(value) if place.is_computed() else place.read() is value
            if not is_there and value is not MISSING and place.path[-1] is not len:
                place.put(value)


def _values(entries: list[Mapping[str, Any]]) -> list[Any]:
    return [*itertools.chain.from_iterable([each.values() for each in entries])]


class State:
    """What one graph needs in the places, and what it leaves there."""

    def __init__(self, before: Snapshot, recording: Recording) -> None:
        before.check()
        self.params = parameters(before.optimizers, before.references.parameters())
        # What the graph begins with: tensors of its own, or a value that must be the same; and whether it may write to
        # these, so that they must be in the place, too.
        self._needs: list[tuple[Callable[[], Any], Place, Any, bool]] = []
        self._results: list[tuple[Place, Any]] = []
        for (place, value), version in zip(before.found, before.versions, strict=True):
            if (id(place.root), *place.path[1:3]) in recording.followed:
                continue
            after = place.read()
            is_computed = place.is_computed()
            if (is_computed or (is_number(value) and is_number(after))) and value != after:
                raise NotImplementedError(f"every call changes {place.name}, which no graph can")
            is_written, is_replaced = version_of(after) != version, after is not value and not is_computed
            if place.optional and not is_replaced and not is_written:
                continue
            if place.optional:
                self.params.append(place.root)
            if is_replaced and after is not MISSING:
                self._results.append((place, after))
                if place.temporary and isinstance(value, Tensor) and id(value) not in recording.reads:
                    continue
            if value is not MISSING:
                self._needs.append((place.reader(), place, value, is_written or not place.variable))
        self._addresses = [param.data_ptr() for param in self.params]
        self._entries = before.references.entries()
        self._filled = [each for each in self._entries if each]  # few have hooks, and of the others the size will do
        self._sizes, self._parts = [*map(len, self._entries)], _values(self._filled)
        self._are_trained = [param.requires_grad for param in self.params]

    def is_stale(self) -> bool:
        """Whether a parameter has other memory now, so that the graph is of no use any more."""
        return not lie_at(self.params, self._addresses)

    @torch.no_grad()
    def bring(self) -> str | None:
        """Copies what is elsewhere to the graph's memory; or returns the name of what it cannot begin with."""
        if [param.requires_grad for param in self.params] != self._are_trained:
            return "which parameters require gradients"
        if [*map(len, self._entries)] != self._sizes or not all(map(operator.is_, _values(self._filled), self._parts)):
            return "the parts or hooks of a module"
        moved = []
        for read, place, need, is_changed in self._needs:
            found = read()
            if found is need:
                continue
            both = isinstance(need, Tensor) + isinstance(found, Tensor)
            if both == 2 and (need.shape, need.dtype, need.device) == (found.shape, found.dtype, found.device):
                # A copy: two may have changed places, and all are read before one is written to.
                moved.append((place, need, found.clone(), is_changed))
            elif both or not place.has(need):
                return f"{place.name} (was {reprlib.repr(need)})"
        for place, need, value, is_changed in moved:
            need.detach().copy_(value)
            if is_changed:
                place.put(need)
        return None

    def leave(self) -> None:
        """Puts the results where a step of Python would have put them."""
        for place, after in self._results:
            if place.read() is not after:
                place.put(after)
