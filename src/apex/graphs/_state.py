"""State outside the graph that a training step reads or changes.

This is gradients, optimizer state, loss scales, and tensors in the function's variables. A graph computes with the
tensors that it saw during the capture. Before a replay, the current values at the same locations are copied into these
tensors. After the replay, the graph's results are put at the locations, as the function itself would have done.
"""

from __future__ import annotations

import gc
import operator
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._random import host_states, restore_host_states
from ..amp._amp_state import _amp_state
from ..ops._graph_numbers import CaptureContext, is_number
from ..ops._host import HOST, on_host
from ..ops.multi_tensor.tables import lie_at
from ._references import MISSING, References, StateLocation, parts_of


def parameters(optimizers: Iterable[Any], others: Iterable[Tensor] = ()) -> list[Tensor]:
    """Return the parameters that a step may change, amp's half-precision copies of them, and `others`."""
    params = [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
    params += [param for optimizer in _amp_state.optimizers for param in optimizer._amp_stash.all_fp16_params]
    return list({id(param): param for param in (*params, *others)}.values())


def version_of(value: Any) -> int | None:
    """Return a number that grows when a tensor is written to, or None for other values and inference tensors."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def hyperparameters(optimizers: Sequence[Any]) -> list[StateLocation]:
    """Return the locations of optimizers' defaults, group entries and lengths, except step counts on the host."""
    locations = []
    for optimizer in optimizers:
        defaults, groups = StateLocation.of(optimizer, "defaults"), StateLocation.of(optimizer, "param_groups")
        locations += [groups.item(len), *(defaults.item(name) for name in optimizer.defaults)]
        for index, group in enumerate(optimizer.param_groups):
            entries = {name: groups.item(index).item(name) for name in group}
            locations.append(entries.pop("params").item(len))
            entries = {
                name: item for name, item in entries.items() if name != "step" or isinstance(group[name], Tensor)
            }
            locations += entries.values()
    return locations


def _training_locations(optimizers: Sequence[Any]) -> list[StateLocation]:
    """Return all locations in these optimizers and in amp, and the gradients of all leaf tensors of the process."""
    locations = hyperparameters(optimizers)
    # An optimizer may step outside of the function, and a backward pass may reach another optimizer's parameters.
    leaves = [value for value in gc.get_objects() if issubclass(type(value), Tensor) and _is_leaf(value)]
    locations += [StateLocation.of(leaf, "grad", temporary=True) for leaf in parameters(optimizers, leaves)]
    for optimizer in optimizers:
        for name in ("state", "_skipped", "most_recent_scale", "scale_set_by_backward"):
            parts = parts_of(StateLocation.of(optimizer, name))
            locations += [part._replace(temporary=part.path[-1] is len) for part in parts]
    for stash in (optimizer._amp_stash for optimizer in _amp_state.optimizers):
        names = ("found_inf", "already_patched", "params_have_scaled_gradients", "delayed_scale")
        locations += [StateLocation.of(stash, name) for name in names]
    for scaler in _amp_state.loss_scalers:
        locations += [StateLocation.of(scaler, name, temporary=name == "_overflow_buf") for name in vars(scaler)]
    return locations


def _is_leaf(tensor: Tensor) -> bool:
    """Return whether autograd accumulates gradients in a tensor."""
    try:
        return tensor.requires_grad and tensor.is_leaf
    except Exception:  # a view whose base was written to, a tensor of torch.func, or a subclass that refuses
        return False


def _dicts(value: Any) -> Iterator[dict[Any, Any]]:
    """Yield a dict, and all dicts nested in its values and lists."""
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _dicts(part)


def _bits(state: Any) -> Any:
    """Return the state of a random number generator in a form that can be compared."""
    return state.tolist() if isinstance(state, Tensor) else state


class Snapshot:
    """State saved before a capture; `restore` puts it back."""

    def __init__(self, optimizers: Sequence[Any], references: References, device: torch.device) -> None:
        self.optimizers, self.references = optimizers, references
        # Locations, values, versions of tensors, and copies of the tensors that the host computes with.
        self.values: list[tuple[StateLocation, Any, int | None, Tensor | None]] = []
        self._owners = {id(location): location.owners() for location in references.variables}
        for location in (*_training_locations(optimizers), *references.locations()):
            value = location.read()
            is_frozen = isinstance(value, Tensor) and on_host(value) and device != HOST and not location.temporary
            self.values.append((location, value, version_of(value), value.clone() if is_frozen else None))
        stashes = (optimizer._amp_stash for optimizer in _amp_state.optimizers)
        owners = (*optimizers, *stashes, *references.scalers)
        self._dicts = [(entries, dict(entries)) for owner in owners for entries in _dicts(vars(owner))]
        self._random = host_states()

    def check(self) -> None:
        """Raise if the host has done something since the snapshot that a replay would not repeat."""
        now = host_states()  # NumPy may have been loaded meanwhile
        if any(_bits(now[name]) != _bits(before) for name, before in self._random.items()):
            raise NotImplementedError(
                "random numbers are drawn on the host, which a graph would freeze; draw them on the device"
            )

    def restore(self) -> None:
        """Put all saved values back. A capture does not change values on the device."""
        restore_host_states(self._random)
        for entries, before in self._dicts:
            entries.clear()
            entries.update(before)
        for location, value, version, copied in self.values:
            if copied is not None and version_of(value) != version:
                value.copy_(copied)
            if value is not MISSING and location.path[-1] is not len and not location.has(value):
                for owner, saved_owner in self._owners.get(id(location), ()):
                    if owner.read() is not saved_owner:
                        owner.put(saved_owner)
                location.put(value)


class State:
    """Values that a captured graph reads before each replay and writes back after it."""

    def __init__(self, before: Snapshot, capture: CaptureContext) -> None:
        before.check()
        # Values that the graph begins with: its own tensors, or values that must be equal. The bool says whether the
        # graph may write to a tensor, so that the tensor itself must be at the location, too.
        self._needs: list[tuple[StateLocation, Any, bool]] = []
        self._results: list[tuple[StateLocation, Any]] = []
        leaves: list[Tensor] = []
        # Parameters without gradients before the step and after it. A gradient that an earlier call has left there
        # would be added to the step's own.
        self._without_gradient: list[Tensor] = []
        stepped = {id(param) for param in parameters(before.optimizers)}
        for location, value, version, copied in before.values:
            if (id(location.root), *location.path[1:]) in capture.followed:
                continue
            after = location.read()
            if location.temporary and value is after is None and id(location.root) in stepped:
                self._without_gradient.append(location.root)
                continue
            is_read = id(value) in capture.reads and value is not None
            is_written, is_replaced = version_of(after) != version, not location.has(value)
            if location.temporary and not (is_written or is_replaced or is_read):
                continue
            is_lost = after is MISSING or (is_number(value) and is_number(after))
            if (is_replaced and is_lost) or (copied is not None and is_written):
                raise NotImplementedError(f"every call changes {location.name}, which no graph can")
            if location.temporary and isinstance(location.root, Tensor):
                leaves.append(location.root)
            if is_replaced:
                self._results.append((location, after))
                if location.temporary and isinstance(value, Tensor) and not is_read:
                    continue
            if value is not MISSING:
                self._needs.append((location, value, is_written or not location.variable))
        self._needs += [
            (StateLocation(guard.number.name, guard, ("now",)), guard.decision, False) for guard in capture.guards
        ]
        self._entries = before.references.entries()
        self._parts = [part for entries in self._entries for part in entries.values()]
        leaves += [part for part in self._parts if type(part) in (Tensor, nn.Parameter)]
        self.params = parameters(before.optimizers, leaves)
        self._addresses = [param.data_ptr() for param in self.params]
        self._are_trained = [param.requires_grad for param in self.params]

    def is_stale(self) -> bool:
        """Return whether a parameter's memory has moved, so that the graph can no longer be used."""
        return not lie_at(self.params, self._addresses)

    @torch.no_grad()
    def copy_in(self) -> str | None:
        """Copy current values to the graph's memory; return the name of a value that does not fit, or None."""
        if [param.requires_grad for param in self.params] != self._are_trained:
            return "which parameters require gradients"
        parts = [part for entries in self._entries for part in entries.values()]
        if len(parts) != len(self._parts) or not all(map(operator.is_, parts, self._parts)):
            return "the parts or hooks of a module"
        if any(param.grad is not None for param in self._without_gradient):
            return "the gradients that an earlier call left (were None)"
        moved = []
        for location, need, is_changed in self._needs:
            current = location.read()
            if current is need:
                continue
            both = isinstance(need, Tensor) + isinstance(current, Tensor)
            if both == 2 and (need.shape, need.dtype, need.device) == (current.shape, current.dtype, current.device):
                # Cloned, because two tensors may have been swapped: all are read before one is written to.
                moved.append((location, need, current.clone(), is_changed))
            elif both or not location.has(need):
                return f"{location.name} (was {reprlib.repr(need)})"
        for location, need, value, is_changed in moved:
            need.detach().copy_(value)
            if is_changed:
                location.put(need)
        return None

    def store_results(self) -> None:
        """Put the graph's results at the locations where the Python function would have put them."""
        for location, after in self._results:
            if not location.has(after):
                location.put(after)
