"""The layout of parameters in buckets, and of buckets in shards of ranks.

Parameters lie one after the other in one flat space, each at a multiple of `alignment` elements. The space is cut into
buckets of equal size; the last one may be smaller. Every bucket is cut into as many equal shards as there are ranks.
Rank r owns the r-th shard of every bucket. Its shards, one after the other, are its flat shard.

    |  parameter 0  |  parameter 1      |p2| |  parameter 3        |   |      the flat space
    |        bucket 0       |        bucket 1       |   bucket 2       |
    | rank 0    | rank 1    | rank 0    | rank 1    | rank 0 | rank 1  |
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of parameter number `param`.

    They lie in `bucket` from `offset` on, and in the flat space from `flat` on. For a piece that a rank owns, `offset`
    counts from the start of its shard of the bucket, and `flat` from the start of its flat shard.
    """

    param: int
    start: int
    stop: int
    bucket: int
    offset: int
    flat: int

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.stop - self.start


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def cuts(stretches: Sequence[tuple[int, int]], total: int) -> list[int]:
    """Return the sizes of a gap, a stretch, a gap, ..., a gap; `stretches` has the start and size of each stretch."""
    sizes, end = [], 0
    for start, size in stretches:
        sizes += [start - end, size]
        end = start + size
    return [*sizes, total - end]


class Layout:
    """The layout of parameters with these `sizes` in buckets of at most `bucket_size` elements over `ranks` ranks.

    `bucket_size` is rounded down to a multiple of `ranks * alignment`, and is at least that; None puts everything into
    one bucket.
    """

    def __init__(
        self, sizes: Sequence[int], ranks: int = 1, bucket_size: int | None = None, alignment: int = 1
    ) -> None:
        if ranks < 1 or alignment < 1:
            raise ValueError(f"ranks={ranks} and alignment={alignment} must be positive")
        if any(size < 0 for size in sizes):
            raise ValueError(f"sizes has a negative one: {list(sizes)}")
        self.sizes = tuple(sizes)
        self.ranks = ranks
        self.alignment = alignment
        starts, end = [], 0
        for size in self.sizes:
            starts.append(round_up(end, alignment) if size else end)
            end = starts[-1] + size
        # The start of each parameter in the flat space.
        self.starts = tuple(starts)
        unit = ranks * alignment
        whole = round_up(end, unit)
        full = whole if bucket_size is None else max(unit, bucket_size // unit * unit)
        self.bucket_sizes = tuple(min(full, whole - at) for at in range(0, whole, max(full, 1)))
        self.bucket_starts = tuple(full * number for number in range(len(self.bucket_sizes)))
        self.shard_sizes = tuple(size // ranks for size in self.bucket_sizes)
        # The start of each bucket's shard in a rank's flat shard.
        self.shard_starts = tuple(start // ranks for start in self.bucket_starts)
        # The number of elements of the flat space, and of a rank's flat shard.
        self.size = whole
        self.shard_size = whole // ranks
        # The number of elements if all buckets had the full size.
        self.capacity = full * len(self.bucket_sizes)

    @functools.cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """Return the pieces of parameters in each bucket, in order."""
        pieces: list[list[Piece]] = [[] for _ in self.bucket_sizes]
        full = self.bucket_sizes[0] if self.bucket_sizes else 1
        for param, (size, begin) in enumerate(zip(self.sizes, self.starts, strict=True)):
            start = 0
            while start < size:
                bucket, offset = divmod(begin + start, full)
                stop = min(size, start + self.bucket_sizes[bucket] - offset)
                pieces[bucket].append(Piece(param, start, stop, bucket, offset, begin + start))
                start = stop
        return tuple(map(tuple, pieces))

    @functools.cached_property
    def buckets_of(self) -> tuple[tuple[int, ...], ...]:
        """Return, for each parameter, the buckets that hold elements of it."""
        buckets: list[list[int]] = [[] for _ in self.sizes]
        for pieces in self.pieces:
            for piece in pieces:
                buckets[piece.param].append(piece.bucket)
        return tuple(map(tuple, buckets))

    @functools.cached_property
    def _cuts(self) -> list[list[int]]:
        """Return, for each bucket, the sizes of a gap, a piece, a gap, ..., a gap."""
        return [
            cuts([(piece.offset, piece.size) for piece in pieces], size)
            for size, pieces in zip(self.bucket_sizes, self.pieces, strict=True)
        ]

    def cut(self, bucket: Any, number: int) -> Sequence[Any]:
        """Return views of the pieces of bucket `number`, a tensor: one split is many times faster than slices."""
        return bucket.split(self._cuts[number])[1::2]

    def owned_by(self, rank: int) -> tuple[Piece, ...]:
        """Return the pieces that a rank owns, in the order of its flat shard; a parameter may have several."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank={rank} is not among the {self.ranks} ranks")
        owned = []
        for pieces in self.pieces:
            for piece in pieces:
                shard = self.shard_sizes[piece.bucket]
                begin = max(piece.offset, rank * shard)
                end = min(piece.offset + piece.size, (rank + 1) * shard)
                if begin < end:
                    start = piece.start + begin - piece.offset
                    offset = begin - rank * shard
                    flat = self.shard_starts[piece.bucket] + offset
                    owned.append(Piece(piece.param, start, start + end - begin, piece.bucket, offset, flat))
        return tuple(owned)


class WholeLayout(Layout):
    """A layout that cuts no parameter: each lies in one rank's shard of one bucket.

    Buckets take parameters in their order until they have `bucket_size` elements and a parameter for every rank. The
    parameters of a bucket are assigned in order of falling `work`, each to the rank with the least work so far. Shards
    of a bucket are padded to the largest.

        | rank 0: p1, p3 | rank 1: p0     | rank 2: p2     |      a bucket; p1 and p3 take as much memory as p0
    """

    def __init__(
        self,
        sizes: Sequence[int],
        ranks: int = 1,
        bucket_size: int | None = None,
        alignment: int = 1,
        *,
        work: Sequence[int],
    ) -> None:
        super().__init__(sizes, ranks, bucket_size, alignment)
        members: list[list[int]] = [[]]
        for param in (param for param, size in enumerate(sizes) if size):
            members[-1].append(param)
            elements = sum(sizes[each] for each in members[-1])
            if bucket_size is not None and elements >= bucket_size and len(members[-1]) >= ranks:
                members.append([])
        loads, start = [0] * ranks, 0
        starts, self._members = [0] * len(sizes), [bucket for bucket in members if bucket]
        shard_sizes: list[int] = []
        for bucket in self._members:
            ends = [0] * ranks
            owners: dict[int, int] = {}
            for param in sorted(bucket, key=lambda each: -work[each]):
                rank = min(range(ranks), key=lambda each: (loads[each], ends[each]))
                owners[param] = rank
                starts[param] = ends[rank]
                ends[rank] += round_up(sizes[param], alignment)
                loads[rank] += work[param]
            shard_sizes.append(max(ends))
            for param, rank in owners.items():
                starts[param] += start + rank * shard_sizes[-1]
            start += ranks * shard_sizes[-1]
        self.starts = tuple(starts)
        self.shard_sizes = tuple(shard_sizes)
        self.bucket_sizes = tuple(ranks * size for size in shard_sizes)
        self.shard_starts = tuple(sum(shard_sizes[:number]) for number in range(len(shard_sizes)))
        self.bucket_starts = tuple(ranks * first for first in self.shard_starts)
        self.size = self.capacity = start
        self.shard_size = start // ranks

    @functools.cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """Return the parameters in each bucket, in the order of their positions."""
        pieces = []
        for number, (bucket, begin) in enumerate(zip(self._members, self.bucket_starts, strict=True)):
            placed = ((self.starts[param], param, self.sizes[param]) for param in bucket)
            pieces.append(
                tuple(Piece(param, 0, size, number, start - begin, start) for start, param, size in sorted(placed))
            )
        return tuple(pieces)


def check_fill(layouts: Sequence[Layout]) -> None:
    """Warn of buckets so large that they are mostly empty: they are sent only when the backward pass ends."""
    used = sum(layout.size for layout in layouts) / max(1, sum(layout.capacity for layout in layouts))
    if used < 0.7:
        warnings.warn(
            f"Only {used:.1%} of buckets are used. Consider decreasing the bucket_cap_mb argument.", stacklevel=2
        )


def merge_adjacent(pieces: Sequence[Piece]) -> list[Piece]:
    """Merge pieces of a flat shard that are neighbours in the same parameter.

    With one rank every parameter becomes one piece. A merged piece has the `bucket` and `offset` of its first part.
    """
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else piece
        if (last.param, last.stop, last.flat + last.size) == (piece.param, piece.start, piece.flat):
            merged[-1] = replace(last, stop=piece.stop)
        else:
            merged.append(piece)
    return merged


def pick(storage: Tensor | list[Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
    """Return views of pieces: `storage` is a flat shard, or a list with this rank's shard of each bucket."""
    if isinstance(storage, list):
        return [storage[piece.bucket][piece.offset : piece.offset + piece.size] for piece in pieces]
    return [storage[piece.flat : piece.flat + piece.size] for piece in pieces]
