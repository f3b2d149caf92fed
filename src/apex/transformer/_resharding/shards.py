"""Locations of this rank's parts of tensors within the whole tensors of a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..._distributed.experts import is_expert
from .. import parallel_state

# Suffix of the saved name of the padding rows of a vocabulary, which are saved apart from its words.
PADDING = "|padding"


def tensor_parallel(tensor: Tensor) -> tuple[int, int]:
    """Return the number of ranks that a tensor may be split over, and this process's rank among them."""
    if parallel_state.is_unitialized():
        return 1, 0
    if is_expert(tensor):
        return parallel_state.get_expert_tensor_parallel_world_size(), parallel_state.get_expert_tensor_parallel_rank()
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()


def _expert_parallel(tensor: Tensor) -> tuple[int, int]:
    """Return the number of ranks that hold other experts of the tensor's first dimension, and this process's rank."""
    if parallel_state.is_unitialized() or not is_expert(tensor):
        return 1, 0
    return parallel_state.get_expert_model_parallel_world_size(), parallel_state.get_expert_model_parallel_rank()


class ShardLocation(NamedTuple):
    """The location of this rank's part of a tensor in the whole tensor of shape `size`.

    `ranges` of dimension `dim` are (first row in the part, end in the part, first row in the whole). `first` is added
    to rows of dimension 0, for experts of other ranks.
    """

    size: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int, int], ...]
    first: int = 0

    def among_experts(self, ranks: int, rank: int) -> ShardLocation:
        """Return the location if `ranks` ranks hold as many rows of dimension 0 each."""
        size = (self.size[0] * ranks, *self.size[1:])
        return ShardLocation(size, self.dim, self.ranges, self.size[0] * rank)

    def rows(self, first: int, end: int) -> ShardLocation:
        """Return the location in a whole tensor that consists of rows `first` to `end` only."""
        ranges = []
        for begin, stop, at in self.ranges:
            low, high = max(first, at), min(end, at + stop - begin)
            if low < high:
                ranges.append((begin + low - at, begin + high - at, low - first))
        size = (*self.size[: self.dim], end - first, *self.size[self.dim + 1 :])
        return ShardLocation(size, self.dim, tuple(ranges))

    def boxes(self, view: Tensor, first: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yield the boxes of the whole tensor that `view` covers, a box of the part that starts at `first`."""
        if not self.size:
            yield (), view
            return
        start = first[self.dim]
        for begin, end, at in self.ranges:
            low, high = max(begin, start), min(end, start + view.shape[self.dim])
            if low < high:
                offsets = (*first[: self.dim], at + low - begin, *first[self.dim + 1 :])
                offsets = (offsets[0] + self.first, *offsets[1:])
                yield offsets, view.narrow(self.dim, low - start, high - low)


def replicated_location(size: Sequence[int]) -> ShardLocation:
    """Return the location of a tensor that every rank holds completely."""
    return ShardLocation(tuple(size), 0, ((0, size[0], 0),) if len(size) else ())


def shard_locations(tensor: Tensor) -> dict[str, ShardLocation]:
    """Return the locations of a parameter by suffix of its name; with `vocab_size`, words and padding are separate.

    A part of stride s has s blocks of rows. In the whole, the first blocks of all ranks come before the second blocks.
    Experts (`allreduce = False`) are numbered by dimension 0.
    """
    parts, part = tensor_parallel(tensor)
    location = replicated_location(tensor.shape)
    if getattr(tensor, "tensor_model_parallel", False):
        dim, stride = tensor.partition_dim, tensor.partition_stride  # type: ignore[attr-defined]
        block, rest = divmod(tensor.shape[dim], stride)
        if rest:
            raise ValueError(f"{tensor.shape[dim]} rows of dimension {dim} are no {stride} equal blocks")
        size = (*tensor.shape[:dim], tensor.shape[dim] * parts, *tensor.shape[dim + 1 :])
        ranges = tuple((block * n, block * (n + 1), block * (n * parts + part)) for n in range(stride))
        location = ShardLocation(size, dim, ranges if parts > 1 else ((0, tensor.shape[dim], 0),))
    experts = _expert_parallel(tensor)
    if experts[0] > 1:
        if not tensor.dim() or location.size[0] != tensor.shape[0]:
            raise ValueError("an expert (allreduce=False) cannot be split in dimension 0, which numbers the experts")
        location = location.among_experts(*experts)
    words = getattr(tensor, "vocab_size", None)
    if words is None:
        return {"": location}
    padded = location.size[location.dim]
    if not 0 < words <= padded:
        raise ValueError(f"vocab_size {words} of a parameter is not among its {padded} rows")
    locations = {"": location.rows(0, words), PADDING: location.rows(words, padded)}
    return {name: location for name, location in locations.items() if math.prod(location.size)}


def boxes_of_range(size: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield elements `start` to `stop` of a contiguous tensor as boxes: the first index and the sizes of each."""
    if start >= stop:
        return
    if len(size) < 2:
        yield (start,) * len(size), (stop - start,) * len(size)
        return
    row = math.prod(size[1:])
    while start < stop:
        index, offset = divmod(start, row)
        count = (stop - start) // row
        if offset or not count:
            end = min(stop, (index + 1) * row)
            for first, sizes in boxes_of_range(size[1:], offset, end - index * row):
                yield (index, *first), (1, *sizes)
        else:
            end = start + count * row
            yield (index, *(0 for _ in size[1:])), (count, *size[1:])
        start = end


class Entries:
    """The entries for `torch.distributed.checkpoint` by name: tensors to save, or tensors to fill from `saved`."""

    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        self.state: dict[str, Any] = {}
        self.saved = saved
        # Padding whose size differs from the saved one; the checkpoint has no values for it.
        self.unsaved: list[Tensor] = []

    def add(
        self, key: str, tensor: Tensor, locations: dict[str, ShardLocation], first: Sequence[int] | None = None
    ) -> None:
        """Add this rank's part of a tensor, or the box of it that starts at `first`; raise if the saved one differs."""
        from ...checkpoint._split import Split

        for suffix, location in locations.items():
            boxes = list(location.boxes(tensor, (0,) * tensor.dim() if first is None else first))
            if self.saved is not None:
                saved = self.saved.get(key + suffix)
                if suffix == PADDING and (saved is None or tuple(saved.size) != location.size):
                    self.unsaved += [view for _, view in boxes]
                    continue
                self._check(key, saved, location, tensor)
            self.state.setdefault(key + suffix, Split(location.size, tensor.dtype)).add(boxes)

    def _check(self, key: str, saved: Any, location: ShardLocation, tensor: Tensor) -> None:
        if saved is None:
            raise ValueError(f"it lacks {key}")
        size = getattr(saved, "size", None)
        if size is None:
            raise ValueError(f"{key} is no tensor in it")
        old, new = (saved.properties.dtype, tuple(size)), (tensor.dtype, location.size)
        if old != new:
            raise ValueError(f"{key} is {old[0]} {old[1]} in it, but {new[0]} {new[1]} here")
