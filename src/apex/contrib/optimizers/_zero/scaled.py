"""State in half precision with a scale for every piece of a parameter, so that none of its range is wasted.

A piece is stored divided by its scale, which makes its largest element half of the largest number of the dtype. An
update takes a bucket at a time to float32 and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....ops.multi_tensor import Lists, make_lists, max_norm
from ....ops.multi_tensor.triton_lists import TritonLists, current_stream
from .arena import Arena
from .gradients import GradientSync
from .layout import LocalPiece, cuts
from .state import PARAM, Apply, in_slots
from .weights import Weights


class _Bucket:
    """This rank's shard of a bucket: its pieces, and the stretches they stand for, padding after them included."""

    def __init__(self, pieces: list[LocalPiece], owners: list[int], first_row: int, size: int, arena: Arena) -> None:
        self.pieces = pieces
        self.rows = slice(first_row, first_row + len(pieces))
        self.size = size
        ends = [*(piece.offset for piece in pieces[1:]), size]
        starts = [0, *ends[:-1]]
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        self._lengths = torch.tensor(lengths, device=arena.device)
        self._cuts = cuts([(piece.offset, piece.size) for piece in pieces], size)
        # By owner: which pieces are its own; the lists of them, and the stream and dtype of gradients they are for.
        self.members: dict[int, list[int]] = {}
        for number, piece in enumerate(pieces):
            self.members.setdefault(owners[piece.param], []).append(number)
        self.lists: dict[int, tuple[Any, Lists]] = {}

    def spread(self, per_piece: Tensor) -> Tensor:
        """A value for every element from one for every piece."""
        return torch.repeat_interleave(per_piece, self._lengths, output_size=self.size)

    def cut(self, values: Tensor) -> list[Tensor]:
        """The elements of each piece."""
        return list(values.split(self._cuts)[1::2])


class ScaledState:
    """As `ArenaState`, with `scales`, float32 [pieces, 1 + names]: of the weights first.

    A shard of the largest bucket in float32, for the weights and each name, is kept to work in.
    """

    def __init__(self, arena: Arena, names: Sequence[str]) -> None:
        self.arena = arena
        self.names = tuple(names)
        self._flats = {name: arena.new_shard(arena.dtypes.state) for name in (PARAM, *self.names)}
        self._buckets: list[_Bucket] = []
        row = 0
        for number, size in enumerate(arena.layout.shard_sizes):
            pieces = [piece for piece in arena.owned if piece.bucket == number]
            self._buckets.append(_Bucket(pieces, arena.owners, row, size, arena))
            row += len(pieces)
        self.scales = torch.zeros(row, len(self._flats), device=arena.device)
        self._largest = torch.finfo(arena.dtypes.state).max / 2
        self._wide = torch.zeros(len(self._flats), max(arena.layout.shard_sizes, default=0), device=arena.device)
        self._params = Weights(arena)
        self.write(PARAM, self._params.gather(arena.new_shard(torch.float32)))
        self.connect()

    def connect(self) -> None:
        """To be called when parameters became views of a buffer."""
        self._params.make_outgoing()

    @torch.no_grad()
    def apply(self, gradients: GradientSync, function: Apply, noop: Tensor | None = None) -> None:
        """Calls `function` for every bucket and parameter group; it is to do nothing where `noop` is set."""
        arena = self.arena
        whole = dict(zip((part.param for part in arena.parts), gradients.local(arena), strict=True))
        stream = current_stream(arena.device)
        for number, bucket in enumerate(self._buckets):
            if not bucket.pieces:
                continue
            wide = [self._unscaled(column, number) for column in range(len(self._flats))]
            if arena.groups.is_one:
                given = [whole[piece.param][piece.start : piece.stop] for piece in bucket.pieces]
            else:
                given = bucket.cut(arena.shard(gradients.shards(arena), number))
            for owner, members in bucket.members.items():
                function(owner, self._lists_of(bucket, owner, wide, [given[member] for member in members], stream))
            sent = arena.outgoing[number]
            updated = wide[0] if noop is None else torch.where(noop.reshape(()) != 0, sent.float(), wide[0])
            sent.copy_(updated)
            for column, values in enumerate(wide):
                self._store(column, number, values, noop)

    def _lists_of(self, bucket: _Bucket, owner: int, wide: list[Tensor], gradients: list[Tensor], stream: int) -> Lists:
        """The lists of a parameter group, in the memory that stays; gradients may have moved."""
        key = (stream, gradients[0].dtype)
        known = bucket.lists.get(owner)
        if known is not None and known[0] == key and isinstance(known[1], TritonLists):
            known[1].move_gradients(list(map(Tensor.data_ptr, gradients)))
            return known[1]
        members = bucket.members[owner]
        weights, *state = ([pieces[member] for member in members] for pieces in map(bucket.cut, wide))
        bucket.lists[owner] = key, make_lists(in_slots(weights, gradients, state))
        return bucket.lists[owner][1]

    def _unscaled(self, column: int, number: int) -> Tensor:
        """The elements of a bucket, in the memory to work in."""
        bucket = self._buckets[number]
        stored = self.arena.shard(list(self._flats.values())[column], number)
        return torch.mul(stored, bucket.spread(self.scales[bucket.rows, column]), out=self._wide[column, : bucket.size])

    def _store(self, column: int, number: int, values: Tensor, noop: Tensor | None = None) -> None:
        bucket = self._buckets[number]
        stored = self.arena.shard(list(self._flats.values())[column], number)
        before = self.scales[bucket.rows, column]
        largest = max_norm(bucket.cut(values), per_tensor=True)[1]
        scale = largest / self._largest
        inverse = torch.where(scale > 0, scale.reciprocal(), 0.0)
        scaled = (values * bucket.spread(inverse)).to(stored.dtype)
        if noop is not None:
            skips = noop.reshape(()) != 0
            scale, scaled = torch.where(skips, before, scale), torch.where(skips, stored, scaled)
        before.copy_(scale)
        stored.copy_(scaled)

    # For checkpoints --------------------------------------------------------------------------------------------------

    def read(self, name: str) -> Tensor:
        """A flat shard in float32: of `PARAM` or of one of `names`."""
        column = list(self._flats).index(name)
        values = self.arena.new_shard(torch.float32)
        for number, bucket in enumerate(self._buckets):
            if bucket.pieces:
                self.arena.shard(values, number).copy_(self._unscaled(column, number))
        return values

    @torch.no_grad()
    def write(self, name: str, values: Tensor) -> None:
        """Takes the values of a flat shard. The parameters, which are less coarse, stay what they are."""
        column = list(self._flats).index(name)
        for number, bucket in enumerate(self._buckets):
            if bucket.pieces:
                self._store(column, number, self.arena.shard(values, number).float())
        if name == PARAM and self.arena.outgoing:
            present = self._params.gather(self.arena.new_shard(self.arena.dtypes.parameters))
            for number, outgoing in enumerate(self.arena.outgoing):
                outgoing.copy_(self.arena.shard(present, number))

    def shards(self) -> dict[str, Tensor]:
        """All flat shards that stay from step to step, under the names that buckets have them under."""
        named = {f"{name}_shard": self._flats[name] for name in self.names}
        return {"params_shard": self._flats[PARAM], **named}
