"""Where the parts of tensors that are here lie in the whole tensors of a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .. import parallel_state

# What the rows of a padded vocabulary behind the words are saved as, beside the words.
PADDING = "|padding"


def tensor_parallel() -> tuple[int, int]:
    """How many ranks hold the parts of a layer, and which part is here."""
    if parallel_state.is_unitialized():
        return 1, 0
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()


class Place(NamedTuple):
    """Where the part of a tensor that is here lies in the whole.

    `stretches` of the dimension `dim`: (first row here, end here, first row in the whole).
    """

    size: tuple[int, ...]
    dim: int
    stretches: tuple[tuple[int, int, int], ...]

    def rows(self, first: int, end: int) -> Place:
        """The place in a whole that consists of rows `first` to `end` alone."""
        found = []
        for begin, stop, at in self.stretches:
            low, high = max(first, at), min(end, at + stop - begin)
            if low < high:
                found.append((begin + low - at, begin + high - at, low - first))
        size = (*self.size[: self.dim], end - first, *self.size[self.dim + 1 :])
        return Place(size, self.dim, tuple(found))

    def boxes(self, view: Tensor, first: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """The boxes of the whole that a box of the part has, `view`, which begins at `first` in the part."""
        if not self.size:
            yield (), view
            return
        here = first[self.dim]
        for begin, end, at in self.stretches:
            low, high = max(begin, here), min(end, here + view.shape[self.dim])
            if low < high:
                offsets = (*first[: self.dim], at + low - begin, *first[self.dim + 1 :])
                yield offsets, view.narrow(self.dim, low - here, high - low)


def whole_place(size: Sequence[int]) -> Place:
    """The place of a tensor of which every rank has all."""
    return Place(tuple(size), 0, ((0, size[0], 0),) if len(size) else ())


def places_of(tensor: Tensor) -> dict[str, Place]:
    """Where a parameter's part lies, by what is added to its name: with `vocab_size` words and padding are apart.

    A part of stride s is s blocks of rows; in the whole the first blocks of all ranks come before the second ones.
    """
    parts, part = tensor_parallel()
    place = whole_place(tensor.shape)
    if getattr(tensor, "tensor_model_parallel", False):
        dim, stride = tensor.partition_dim, tensor.partition_stride  # type: ignore[attr-defined]
        block, rest = divmod(tensor.shape[dim], stride)
        if rest:
            raise ValueError(f"{tensor.shape[dim]} rows of dimension {dim} are no {stride} equal blocks")
        size = (*tensor.shape[:dim], tensor.shape[dim] * parts, *tensor.shape[dim + 1 :])
        stretches = tuple((block * n, block * (n + 1), block * (n * parts + part)) for n in range(stride))
        place = Place(size, dim, stretches if parts > 1 else ((0, tensor.shape[dim], 0),))
    words = getattr(tensor, "vocab_size", None)
    if words is None:
        return {"": place}
    padded = place.size[place.dim]
    if not 0 < words <= padded:
        raise ValueError(f"vocab_size {words} of a parameter is not among its {padded} rows")
    found = {"": place.rows(0, words), PADDING: place.rows(words, padded)}
    return {name: place for name, place in found.items() if math.prod(place.size)}


def boxes_of_stretch(size: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements `start` to `stop` of a contiguous tensor as boxes, in order: where they begin, and their sizes."""
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
            for first, sizes in boxes_of_stretch(size[1:], offset, end - index * row):
                yield (index, *first), (1, *sizes)
        else:
            end = start + count * row
            yield (index, *(0 for _ in size[1:])), (count, *size[1:])
        start = end


class Entries:
    """What is given to `torch.distributed.checkpoint`, by name: to be saved, or filled from what was `saved`."""

    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        self.state: dict[str, Any] = {}
        self.saved = saved
        # What a checkpoint has nothing for: padding of another size.
        self.unsaved: list[Tensor] = []

    def add(self, key: str, tensor: Tensor, places: dict[str, Place], first: Sequence[int] | None = None) -> None:
        """This rank's part of a tensor, or a box of it that begins at `first`; raises if another was saved."""
        from ...checkpoint._split import Split

        for suffix, place in places.items():
            boxes = list(place.boxes(tensor, (0,) * tensor.dim() if first is None else first))
            if self.saved is not None:
                found = self.saved.get(key + suffix)
                if suffix == PADDING and (found is None or tuple(found.size) != place.size):
                    self.unsaved += [view for _, view in boxes]
                    continue
                self._check(key, found, place, tensor)
            self.state.setdefault(key + suffix, Split(place.size, tensor.dtype)).add(boxes)

    def _check(self, key: str, found: Any, place: Place, tensor: Tensor) -> None:
        if found is None:
            raise ValueError(f"it lacks {key}")
        size = getattr(found, "size", None)
        if size is None:
            raise ValueError(f"{key} is no tensor in it")
        then, now = (found.properties.dtype, tuple(size)), (tensor.dtype, place.size)
        if then != now:
            raise ValueError(f"{key} is {then[0]} {then[1]} in it, but {now[0]} {now[1]} here")
