"""Saving and loading of fused optimizers, and the names of what `apex.fuse` made of an optimizer of `torch.optim`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ._checkpoints import load_state, load_with_hooks, saved_state
from ._formats import encode_loaded

# Entries of groups that steps make, which PyTorch's optimizers have in the state of parameters.
COUNTS = frozenset({"step", "mu_product"})


def _with_names_of_torch(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a `state_dict` method whose outermost call ends in `_hide_own`."""

    @functools.wraps(method)
    def state_dict(self: Any, *args: Any, **options: Any) -> dict[str, Any]:
        if self._is_saving or not self._extra_entries:
            return method(self, *args, **options)
        self._show_own()
        self._is_saving = True
        try:
            saved = method(self, *args, **options)
        finally:
            self._is_saving = False
        self._hide_own(saved)
        return saved

    return state_dict


def show_own_entries(optimizers: Iterable[Any]) -> None:
    """Give groups the entries that they lack after `state_dict`, before they are read or copied."""
    for optimizer in optimizers:
        if isinstance(optimizer, StateDicts):
            optimizer._show_own()


class StateDicts(torch.optim.Optimizer):
    """State dicts in the format of `torch.optim`.

    `torch.distributed.checkpoint` finds entries by name: those of a state dict, and to load a flat one, those of the
    groups and the state beside it. So a state dict of an optimizer that `apex.fuse` made has the names that PyTorch's
    has. Its groups and state have them from then on, until the next step or load.
    """

    # Entries of groups, and counts in state, that PyTorch's optimizer lacks; `apex.fuse` sets them.
    _extra_entries: frozenset[str] = frozenset()
    _extra_counts: frozenset[str] = frozenset()
    # Entries of each group that the last `state_dict` hid, and counts that state has until they are shown.
    _hidden: Sequence[dict[str, Any]] = ()
    _counted: Sequence[tuple[dict[str, Any], dict[str, Any]]] = ()
    _is_saving = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "state_dict" in vars(cls):
            cls.state_dict = _with_names_of_torch(cls.state_dict)  # type: ignore[method-assign]

    @_with_names_of_torch
    def state_dict(self) -> dict[str, Any]:
        """Return the state, including master weights, in the format of `torch.optim`, which can load it."""
        self._settle_all_skipped()
        return saved_state(self, super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of PyTorch's optimizer of the same algorithm."""
        self._show_own(of_state=False)  # if the load fails, state is as it was
        load_with_hooks(self, state_dict, self._load)
        self._counted = ()

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; `load_state_dict` calls the hooks before and after."""
        load_state(self, state_dict, super().load_state_dict)
        encode_loaded(self)

    def _settle_all_skipped(self) -> None:
        """Leave out skipped steps from the host's counts, which waits for the device."""
        raise NotImplementedError

    def _hide_own(self, saved: dict[str, Any]) -> None:
        """Give a state dict, and groups and state, the names of PyTorch's optimizer."""
        hidden, counted = [], []
        for group, saved_group in zip(self.param_groups, saved["param_groups"], strict=True):
            hidden.append({name: group.pop(name) for name in self._extra_entries & group.keys()})
            for name in self._extra_entries:
                saved_group.pop(name, None)
            for param, key in zip(group["params"], saved_group["params"], strict=True):
                if key in saved["state"]:
                    entries = {n: v for n, v in saved["state"][key].items() if n not in self._extra_counts}
                    saved["state"][key], state = entries, self.state[param]
                    counts = {name: entries[name] for name in COUNTS & entries.keys() - state.keys()}
                    counted.append((state, counts))
                    state.update(counts)
        self._hidden, self._counted = hidden, counted

    def _show_own(self, *, of_state: bool = True) -> None:
        """Undo `_hide_own`."""
        for group, entries in zip(self.param_groups, self._hidden, strict=False):  # a group may have been added
            for name, value in entries.items():
                group.setdefault(name, value)
        if of_state:
            for state, counts in self._counted:
                for name in counts:
                    state.pop(name, None)
            self._counted = ()
