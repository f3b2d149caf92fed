"""State of parameters on its way to and from checkpoints: pieces of parameters, whoever owns them then and now."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...._distributed.collectives import all_gather
from ...._failures import explained
from ....ops.multi_tensor.flat import flat
from .arena import Arena
from .layout import Piece
from .state import PARAM


class State(Protocol):
    """`ArenaState` or `ScaledState`."""

    arena: Arena
    names: tuple[str, ...]

    def read(self, name: str) -> Tensor: ...
    def write(self, name: str, values: Tensor) -> None: ...
    def shards(self) -> dict[str, Tensor]: ...


# (parameter, name, first element, elements): a stretch of a parameter's state in the order of its memory.
Stretch = tuple[Tensor, str, int, Tensor]


def names_of(state: State) -> tuple[str, ...]:
    """The names of everything that is saved of a parameter."""
    return PARAM, *state.names


def by_param(parts: Iterable[Piece]) -> dict[int, list[Piece]]:
    """The parts of each parameter that has any."""
    found: dict[int, list[Piece]] = {}
    for part in parts:
        found.setdefault(part.param, []).append(part)
    return found


def like_param(saved: Tensor, param: Tensor) -> Tensor:
    """A saved tensor's elements in the order in which they lie in the parameter's memory."""
    if saved.shape != param.shape:
        raise ValueError(f"the state of a parameter of shape {tuple(param.shape)} has shape {tuple(saved.shape)}")
    if saved.stride() == param.stride() or (saved.is_contiguous() and param.is_contiguous()):
        return flat(saved)
    return flat(torch.empty_like(param, dtype=saved.dtype, device=saved.device).copy_(saved))


@torch.no_grad()
def gather(states: Sequence[State], keep: bool) -> dict[Tensor, dict[str, Tensor]]:
    """The whole state of every parameter in the host's memory, by name; nothing where it is not to be kept.

    All processes must call it.
    """
    found: dict[Tensor, dict[str, Tensor]] = {}
    for state in states:
        arena = state.arena
        for name in names_of(state):
            values = state.read(name)
            if keep:
                for param in arena.params:
                    found.setdefault(param, {})[name] = torch.empty_like(param, dtype=values.dtype, device="cpu")
            for number, pieces in enumerate(arena.layout.pieces):
                bucket = arena.shard(values, number)
                if arena.groups.ranks > 1:
                    whole = bucket.new_empty(arena.layout.bucket_sizes[number])
                    all_gather(whole, bucket, arena.groups.distributed, "gathering the state of an optimizer").wait()
                    bucket = whole
                for piece in pieces if keep else ():
                    target = flat(found[arena.params[piece.param]][name])
                    target[piece.start : piece.stop] = bucket[piece.offset : piece.offset + piece.size]
    return found


class StateLoader:
    """Collects stretches of saved state; nothing changes before `finish`, which wants all that this rank owns."""

    def __init__(self, states: Sequence[State]) -> None:
        self._states = states
        self._places = {
            param: (number, index)
            for number, state in enumerate(states)
            for index, param in enumerate(state.arena.params)
        }
        self._parts = [by_param(state.arena.parts) for state in states]
        self._values: dict[tuple[int, str], Tensor] = {}
        self._covered: dict[tuple[int, str], int] = {}

    @torch.no_grad()
    def add(self, stretches: Iterable[Stretch]) -> None:
        """Takes the part of a stretch that this rank owns."""
        for param, name, start, saved in stretches:
            number, index = self._places[param]
            key = number, name
            state = self._states[number]
            if key not in self._values:
                self._values[key] = torch.zeros_like(state.read(name))
                self._covered[key] = 0
            for part in self._parts[number].get(index, ()):
                begin, end = max(part.start, start), min(part.stop, start + len(saved))
                if begin < end:
                    at = part.flat + begin - part.start
                    self._values[key][at : at + end - begin].copy_(saved[begin - start : end - start])
                    self._covered[key] += end - begin

    def finish(self, optional: Sequence[str] = ()) -> None:
        """Puts the state in place; raises where something is missing, unless it is optional and all of it is."""
        for number, state in enumerate(self._states):
            wanted = sum(part.size for part in state.arena.parts)
            for name in names_of(state):
                covered = self._covered.get((number, name), 0)
                if covered != wanted and not (name in optional and not covered):
                    raise ValueError(
                        f"the state dict has {covered} of the {wanted} elements of {name} that rank "
                        f"{state.arena.groups.rank} of {state.arena.groups.ranks} needs: it lacks parameters, or is "
                        "that of one rank among others"
                    )
        for (number, name), values in self._values.items():
            self._states[number].write(name, values)


@contextlib.contextmanager
def edited(states: Sequence[State]) -> Iterator[dict[Tensor, dict[str, Tensor]]]:
    """The whole state of every parameter in the host's memory, by name; what is changed there is put in place.

    All processes must enter it, and change the same.
    """
    found = gather(states, keep=True)
    yield found
    loader = StateLoader(states)
    loader.add((param, name, 0, flat(value)) for param, named in found.items() for name, value in named.items())
    loader.finish()


def gather_objects(value: Any, arena_group: Any, ranks: int) -> list[Any] | None:
    """Values of all ranks on the first one; None elsewhere."""
    if ranks == 1:
        return [value]
    root = dist.get_rank(arena_group) == 0
    found: list[Any] | None = [None] * ranks if root else None
    with explained("gathering the state of an optimizer"):
        dist.gather_object(value, found, dst=dist.get_global_rank(arena_group, 0), group=arena_group)
    return found
