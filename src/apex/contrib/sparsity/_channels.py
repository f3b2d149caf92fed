"""Which channels of a model can be permuted together: found on its graph, one number for every channel of every tensor.

Every dimension of a weight that could be permuted (an axis: rows of a weight are output channels, columns input
channels) gets a number for each of its channels, and so does the tensor that flows through the graph. Where a layer
takes such a tensor its channels are joined with the columns of its weight; where two tensors are added, channel by
channel. What an operation does that is not on the allow-list, what the model is given and what it returns is in its
natural order: channels that arrive there are frozen. Channels that are joined move together, and channels can change
places if they appear in the same axes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops._host import HOST


class Axis(NamedTuple):
    """A dimension of a tensor of the model, or of some of its rows; `start` is the number of its first channel."""

    module: nn.Module
    name: str
    tensor: Tensor
    dim: int
    rows: tuple[int, int] | None
    start: int
    width: int

    @property
    def ids(self) -> Tensor:
        """The numbers of its channels."""
        return torch.arange(self.start, self.start + self.width, dtype=torch.int64, device=HOST)


@dataclass(frozen=True)
class Labelled:
    """A tensor in the graph whose dimension `dim`, counted from the last, -1, holds the channels `ids`.

    `exact` is False where that dimension may be a multiple of the channels (flattened images). `rank` may be unknown.
    """

    dim: int
    ids: Tensor
    rank: int | None
    exact: bool = True

    @property
    def place(self) -> int | None:
        """The dimension counted from the first."""
        return None if self.rank is None else self.rank + self.dim


@dataclass(frozen=True)
class Natural:
    """A tensor in its natural order."""

    rank: int | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Attribute:
    """A parameter or buffer of a module that the graph uses by itself."""

    module: nn.Module
    name: str
    tensor: Tensor


class Many(NamedTuple):
    """A tuple of tensors that are all alike, or each of them."""

    each: Any
    values: tuple[Any, ...] | None = None


NUMBER = object()  # a size, a dtype, ...: no tensor


@dataclass
class Group:
    """Channels that can change places among themselves: for each axis, the positions of each channel [copies, n]."""

    size: int
    positions: list[tuple[Axis, Tensor]] = field(default_factory=list)


class Channels:
    """All channels, what is joined and what is frozen."""

    def __init__(self) -> None:
        self.axes: dict[tuple[int, int, tuple[int, int] | None], Axis] = {}
        self._count = 0
        self._joined: list[tuple[Tensor, Tensor]] = []
        self._frozen: list[Tensor] = []

    def axis(
        self, module: nn.Module, name: str, dim: int, rows: tuple[int, int] | None = None, tensor: Tensor | None = None
    ) -> Axis:
        """The axis of a tensor, the same for every module that has this tensor."""
        tensor = getattr(module, name) if tensor is None else tensor
        key = (id(tensor), dim, rows)
        if key not in self.axes:
            self.axes[key] = Axis(module, name, tensor, dim, rows, self._count, tensor.shape[dim])
            self._count += tensor.shape[dim]
        return self.axes[key]

    def join(self, first: Tensor, second: Tensor) -> None:
        """Has channels move together, one by one; as many of each, or all of them are frozen."""
        if len(first) == len(second):
            self._joined.append((first, second))
        else:
            self._frozen += [first, second]

    def freeze(self, value: Any) -> None:
        """Leaves all channels of a value in the graph where they are."""
        if isinstance(value, Labelled | Axis):
            self._frozen.append(value.ids)
        elif isinstance(value, Attribute):
            for dim in range(value.tensor.dim()):
                self.freeze(self.axis(value.module, value.name, dim, tensor=value.tensor))
        elif isinstance(value, Many):
            for each in value.values or (value.each,):
                self.freeze(each)

    def new(self, width: int, frozen: bool) -> Tensor:
        """Numbers for channels that belong to no axis."""
        ids = torch.arange(self._count, self._count + width, dtype=torch.int64, device=HOST)
        self._count += width
        if frozen:
            self._frozen.append(ids)
        return ids

    def groups(self) -> list[Group]:
        """What can be permuted, in the order of the model."""
        self._freeze_mixed_rows()
        roots = self._roots()
        frozen = torch.zeros(self._count, dtype=torch.bool, device=HOST)
        if self._frozen:
            frozen[roots[torch.cat(self._frozen)]] = True
        # Channels appear in the same axes if the sums of random numbers, one for each axis, are equal.
        generator = torch.Generator(device=HOST).manual_seed(0)
        axes = list(self.axes.values())
        codes = torch.randint(-(2**62), 2**62, (len(axes),), generator=generator, dtype=torch.int64, device=HOST)
        signature = torch.zeros(self._count, dtype=torch.int64, device=HOST)
        for axis, code in zip(axes, codes, strict=True):
            signature.index_add_(0, roots[axis.ids], code.expand(axis.width))
        free = torch.where((roots == torch.arange(self._count, dtype=torch.int64, device=HOST)) & ~frozen)[0]
        members: dict[int, list[int]] = {}
        for root, code in zip(free.tolist(), signature[free].tolist(), strict=True):
            members.setdefault(code, []).append(root)
        return [
            self._group(torch.tensor(each, dtype=torch.int64, device=HOST), axes, roots) for each in members.values()
        ]

    def _group(self, members: Tensor, axes: list[Axis], roots: Tensor) -> Group:
        group = Group(len(members))
        number = torch.full((self._count,), -1, dtype=torch.int64, device=HOST)
        number[members] = torch.arange(len(members), dtype=torch.int64, device=HOST)
        for axis in axes:
            numbers = number[roots[axis.ids]]
            (places,) = torch.where(numbers >= 0)
            if len(places):
                # Stable: of a channel that appears twice, all first appearances come before all second ones.
                order = numbers[places].sort(stable=True).indices
                group.positions.append((axis, places[order].view(len(members), -1).t()))
        return group

    def _roots(self) -> Tensor:
        """For each channel the smallest number of those that it is joined with."""
        roots = torch.arange(self._count, dtype=torch.int64, device=HOST)
        if not self._joined:
            return roots
        first, second = (torch.cat(ids) for ids in zip(*self._joined, strict=True))
        while True:
            before = roots.clone()
            lowest = torch.minimum(roots[first], roots[second])
            for ids in (first, second, before[first], before[second]):
                roots.scatter_reduce_(0, ids, lowest, "amin")
            roots = roots[roots]
            if torch.equal(roots, before):
                return roots

    def _freeze_mixed_rows(self) -> None:
        """A tensor that is used whole in one place and by groups of rows in another stays as it is."""
        ways: dict[tuple[int, int], set[tuple[int, int] | None]] = {}
        for tensor, dim, rows in self.axes:
            ways.setdefault((tensor, dim), set()).add(rows)
        for (tensor, dim, _), axis in self.axes.items():
            found = ways[tensor, dim]
            spans = sorted(rows for rows in found if rows is not None)
            overlap = any(one[1] > other[0] for one, other in itertools.pairwise(spans))
            if overlap or (None in found and spans):
                self.freeze(axis)


def elementwise(channels: Channels, values: Iterable[Any]) -> Any:
    """The result of an operation that treats all channels alike and broadcasts: what is joined, and where channels are.

    Tensors that are not in the same order, or whose channels are in different dimensions, are frozen.
    """
    tensors = [value for value in values if value is not NUMBER]
    labels = [value for value in tensors if isinstance(value, Labelled)]
    if not tensors:
        return NUMBER
    if not labels:
        if len(tensors) == 1 and isinstance(tensors[0], Attribute):
            return tensors[0]
        return _give_up(channels, tensors)
    first = labels[0]
    if any(label.dim != first.dim or len(label.ids) != len(first.ids) for label in labels):
        return _give_up(channels, tensors)
    for value in tensors:
        if not isinstance(value, Labelled) and _touches(value, first) is None:
            return _give_up(channels, tensors)
    for value in tensors:
        if isinstance(value, Labelled):
            channels.join(first.ids, value.ids)
        elif _touches(value, first):
            assert isinstance(value, Attribute)
            dim = value.tensor.dim() + first.dim
            channels.join(first.ids, channels.axis(value.module, value.name, dim, tensor=value.tensor).ids)
    ranks = [value.rank if not isinstance(value, Attribute) else value.tensor.dim() for value in tensors]
    rank = None if None in ranks else max(ranks)  # type: ignore[type-var]
    return replace(first, rank=rank, exact=all(label.exact for label in labels))


def _touches(value: Any, label: Labelled) -> bool | None:
    """Whether an operand has elements for each channel; None if that is not known, or they cannot be permuted."""
    shape = tuple(value.tensor.shape) if isinstance(value, Attribute) else getattr(value, "shape", None)
    if shape is None:
        return None
    if len(shape) < -label.dim or shape[label.dim] == 1:
        return False
    return True if isinstance(value, Attribute) and shape[label.dim] == len(label.ids) else None


def _give_up(channels: Channels, values: Iterable[Any]) -> Natural:
    for value in values:
        channels.freeze(value)
    return Natural()


def concatenated(channels: Channels, values: list[Any], dim: int) -> Any:
    """The result of `torch.cat` along `dim`."""
    labels = [value for value in values if isinstance(value, Labelled)]
    if not labels:
        return _give_up(channels, values)
    first = labels[0]
    if dim >= 0 and first.rank is None:
        return _give_up(channels, values)
    dim = dim - first.rank if dim >= 0 else dim  # type: ignore[operator]
    if dim != first.dim:
        if any(
            isinstance(value, Natural) or (not isinstance(value, Labelled) and not _touches(value, first))
            for value in values
        ):
            return _give_up(channels, values)
        return elementwise(channels, values)
    parts = []
    for value in values:
        if isinstance(value, Labelled) and value.dim == dim and value.exact:
            parts.append(value.ids)
        elif isinstance(value, Natural) and value.shape is not None:
            parts.append(channels.new(value.shape[dim], frozen=True))
        else:
            return _give_up(channels, values)
    return replace(first, ids=torch.cat(parts))


def rearranged(label: Labelled, order: list[int]) -> Labelled:
    """The result of `permute` with this order of dimensions."""
    assert label.rank is not None
    assert label.place is not None
    return replace(label, dim=order.index(label.place) - label.rank)


def flattened(label: Labelled, start: int, end: int, trailing_is_one: bool) -> Labelled | None:
    """The result of `flatten`; None where channels cannot be told apart any more."""
    if label.rank is None or label.place is None:
        return None
    start, end, place = start % label.rank, end % label.rank, label.place
    rank = label.rank - (end - start)
    if end < place:
        return replace(label, rank=rank)
    if start > place:
        return replace(label, rank=rank, dim=place - rank)
    if start < place:
        return None
    return replace(label, rank=rank, dim=place - rank, exact=label.exact and (start == end or trailing_is_one))


def indexed(label: Labelled, index: Any) -> Labelled | None:
    """The result of indexing with integers and slices that leave the channels alone; None for any other."""
    entries = index if isinstance(index, tuple) else (index,)
    if label.rank is None or len(entries) > label.rank or not all(isinstance(each, int | slice) for each in entries):
        return None
    place = label.rank + label.dim
    if place < len(entries) and entries[place] != slice(None):
        return None
    gone = [at for at, entry in enumerate(entries) if isinstance(entry, int)]
    return replace(label, rank=label.rank - len(gone), dim=label.dim + sum(at > place for at in gone))


def reduced(label: Labelled, dims: Iterable[int], keepdim: bool) -> Any:
    """The result of a mean or sum over some dimensions; over the channels it does not depend on their order."""
    if label.rank is None:
        return None
    places = {dim % label.rank for dim in dims}
    if label.place in places:
        return Natural(label.rank if keepdim else label.rank - len(places))
    if keepdim:
        return label
    right = sum(place > label.place for place in places)  # type: ignore[operator]
    return replace(label, rank=label.rank - len(places), dim=label.dim + right)
