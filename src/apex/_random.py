"""Random number generators of the host: Python's, PyTorch's and, if it is loaded, NumPy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch


def host_generators() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Return a getter and a setter for the state of each generator, by name."""
    generators: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "python": (random.getstate, random.setstate),
        "host": (torch.get_rng_state, torch.set_rng_state),
    }
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        generators["numpy"] = numpy.get_state, numpy.set_state
    return generators


def host_states() -> dict[str, Any]:
    """Return the states of all generators without arrays, so that they can be compared and loaded safely."""
    return {name: _without_arrays(get()) for name, (get, _) in host_generators().items()}


def restore_host_states(states: dict[str, Any]) -> None:
    """Restore the generators whose states are given; NumPy's only if it is loaded."""
    for name, (_, put) in host_generators().items():
        if name in states:
            put(states[name])


def seed_host(seed: int) -> None:
    """Seed all generators; PyTorch's of the device too."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _without_arrays(state: Any) -> Any:
    """Return a generator's state with NumPy's arrays as lists."""
    if isinstance(state, tuple):
        return tuple(map(_without_arrays, state))
    return state.tolist() if hasattr(state, "tolist") and not isinstance(state, torch.Tensor) else state
