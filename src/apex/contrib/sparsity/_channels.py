"""Finds which channels of a model can be permuted together, by numbering the channels in its graph.

An axis is a dimension of a weight that could be permuted: rows are output channels, columns input channels. Every axis
gets a number for each of its channels, and so does the tensor that flows through the graph. If a layer takes a tensor,
the tensor's channels are joined with the columns of the weight; if tensors are added, their channels are joined with
each other. The model's inputs and outputs, and the operands of unknown operations, must keep their natural order:
channels that arrive there are frozen. Joined channels move together. Two channels can change places if they appear in
the same axes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops._host import HOST

Rows = tuple[int, int] | None
NUMBER = object()  # stands for a value that is no tensor: a size, a dtype


def _numbers(start: int, count: int) -> Tensor:
    return torch.arange(start, start + count, dtype=torch.int64, device=HOST)


class Axis(NamedTuple):
    """A dimension of a tensor of the model, or of some of its rows; `ids` are the numbers of its channels."""

    tensor: Tensor
    dim: int
    rows: Rows
    ids: Tensor

    def part(self, tensor: Tensor) -> Tensor:
        """Return the rows of a tensor, shaped like the axis' tensor, that the axis belongs to."""
        return tensor if self.rows is None else tensor[slice(*self.rows)]


@dataclass(frozen=True)
class Natural:
    """A tensor in the graph whose channels are in their natural order; its rank may be unknown.

    If it is a parameter or buffer, `tensor` holds it.
    """

    shape: tuple[int, ...] | None = None
    rank: int | None = None
    tensor: Tensor | None = None


@dataclass(frozen=True)
class Labelled:
    """A tensor in the graph whose dimension `dim` holds the channels `ids`; `dim` is negative, -1 being the last.

    `exact` is False if the dimension's size may be a multiple of their number (flattened images). `rank` may be None.
    """

    dim: int
    ids: Tensor
    rank: int | None
    exact: bool = True

    @property
    def positive_dim(self) -> int:
        """Return the dimension counted from the first; the rank must be known."""
        return (self.rank or 0) + self.dim

    def moved(self, order: Sequence[int]) -> Labelled:
        """Return the label after a permutation of dimensions; dimensions missing from `order` are removed."""
        return replace(self, rank=len(order), dim=list(order).index(self.positive_dim) - len(order))


class Group(NamedTuple):
    """Channels that can be exchanged with each other.

    `positions` lists, for every axis, the channels' indices in it: [times each channel appears, size].
    """

    size: int
    positions: list[tuple[Axis, Tensor]]


class ChannelGraph:
    """All channels of a model, and which of them are joined and which frozen."""

    def __init__(self) -> None:
        self.axes: dict[tuple[int, int, Rows], Axis] = {}
        self._count = 0
        self._joined = [(_numbers(0, 0), _numbers(0, 0))]
        self._frozen = [_numbers(0, 0)]

    def axis(self, tensor: Tensor, dim: int, rows: Rows = None) -> Axis:
        """Return the axis of a tensor; modules that share a tensor share the axis."""
        key = (id(tensor), dim, rows)
        if key not in self.axes:
            self.axes[key] = Axis(tensor, dim, rows, self.new(tensor.shape[dim]))
        return self.axes[key]

    def new(self, width: int) -> Tensor:
        """Return numbers for `width` further channels."""
        self._count += width
        return _numbers(self._count - width, width)

    def join(self, first: Tensor, second: Tensor) -> None:
        """Make the channels of `first` and `second` move together, pair by pair."""
        self._joined.append((first, second))

    def freeze(self, *values: Any) -> Natural:
        """Freeze all channels of values in the graph in their natural order."""
        for value in values:
            if isinstance(value, Labelled | Axis):
                self._frozen.append(value.ids)
            elif isinstance(value, Natural) and value.tensor is not None:
                self.freeze(*(self.axis(value.tensor, dim) for dim in range(value.tensor.dim())))
            elif isinstance(value, tuple):
                self.freeze(*value)
        return Natural()

    def groups(self) -> list[Group]:
        """Return the groups of channels that can be permuted, in the order of the model."""
        axes = list(self.axes.values())
        heights = defaultdict(set)
        for axis in axes:
            heights[id(axis.tensor), axis.dim].add(axis.rows and axis.rows[1] - axis.rows[0])
        # A tensor that one layer uses whole and another by groups of rows is not permuted.
        self.freeze(*(axis for axis in axes if len(heights[id(axis.tensor), axis.dim]) > 1))
        roots = self._roots()
        frozen = torch.zeros(self._count, dtype=torch.bool, device=HOST)
        frozen[roots[torch.cat(self._frozen)]] = True
        # Each axis has a random number. Channels appear in the same axes if the sums of these numbers are equal.
        generator = torch.Generator(device=HOST).manual_seed(0)
        codes = torch.randint(-(2**62), 2**62, (len(axes),), generator=generator, dtype=torch.int64, device=HOST)
        signature = torch.zeros(self._count, dtype=torch.int64, device=HOST)
        for axis, code in zip(axes, codes, strict=True):
            signature.index_add_(0, roots[axis.ids], code.expand(len(axis.ids)))
        (free,) = torch.where((roots == _numbers(0, self._count)) & ~frozen)
        members = defaultdict(list)
        for root, total in zip(free.tolist(), signature[free].tolist(), strict=True):
            members[total].append(root)
        return [self._group(root_ids, axes, roots) for root_ids in members.values()]

    def _group(self, members: list[int], axes: list[Axis], roots: Tensor) -> Group:
        group = Group(len(members), [])
        number = torch.full((self._count,), -1, dtype=torch.int64, device=HOST)
        number[members] = _numbers(0, len(members))
        for axis in axes:
            numbers = number[roots[axis.ids]]
            (positions,) = torch.where(numbers >= 0)
            if len(positions):
                # Stable: all first appearances of channels come before all second ones.
                order = numbers[positions].sort(stable=True).indices
                group.positions.append((axis, positions[order].view(len(members), -1).t()))
        return group

    def _roots(self) -> Tensor:
        """Return for each channel the smallest number among the channels joined with it."""
        first, second = (torch.cat(ids) for ids in zip(*self._joined, strict=True))
        roots, previous = _numbers(0, self._count), None
        while previous is None or not torch.equal(roots, previous):
            previous = roots.clone()
            lowest = torch.minimum(roots[first], roots[second])
            for ids in (first, second, previous[first], previous[second]):
                roots.scatter_reduce_(0, ids, lowest, "amin")
            roots = roots[roots]
        return roots

    def elementwise(self, values: Sequence[Any]) -> Any:
        """Join the channels of an elementwise operation's operands, which broadcast, and return its result."""
        tensors = [value for value in values if value is not NUMBER]
        first = next((value for value in tensors if isinstance(value, Labelled)), None)
        if first is None:
            alone = len(tensors) == 1 and isinstance(tensors[0], Natural)
            return NUMBER if not tensors else tensors[0] if alone else self.freeze(*tensors)
        operand_ids = [self._beside(value, first) for value in tensors]
        if any(ids is None or len(ids) != len(first.ids) for ids in operand_ids):
            return self.freeze(*tensors)
        for ids in operand_ids:
            self.join(first.ids, ids)
        ranks = [value.rank for value in tensors]
        exact = all(getattr(value, "exact", True) for value in tensors)
        return replace(first, rank=None if None in ranks else max(ranks), exact=exact)

    def _beside(self, value: Any, label: Labelled) -> Any:
        """Return the channels of an operand that meet the label's channels in an elementwise operation.

        An operand of size 1 in that dimension meets all of them: the label's own channels are returned. Returns None if
        the channels are unknown or in their natural order.
        """
        if isinstance(value, Labelled):
            return value.ids if value.dim == label.dim else None
        if not isinstance(value, Natural) or value.shape is None:
            return None
        if len(value.shape) < -label.dim or value.shape[label.dim] == 1:
            return label.ids
        return None if value.tensor is None else self.axis(value.tensor, len(value.shape) + label.dim).ids

    def concatenated(self, values: Sequence[Any], dim: int) -> Any:
        """Return the result of `torch.cat` along `dim`."""
        first = next((value for value in values if isinstance(value, Labelled)), None)
        if first is None or (dim >= 0 and first.rank is None):
            return self.freeze(*values)
        dim = dim - (first.rank or 0) if dim >= 0 else dim
        if dim != first.dim:
            return self.elementwise(values)
        parts = []
        for value in values:
            if isinstance(value, Labelled) and value.dim == dim and value.exact:
                parts.append(value.ids)
            elif isinstance(value, Natural) and value.tensor is None and value.shape is not None:
                parts.append(self.new(value.shape[dim]))
                self._frozen.append(parts[-1])
            else:
                return self.freeze(*values)
        return replace(first, ids=torch.cat(parts))
