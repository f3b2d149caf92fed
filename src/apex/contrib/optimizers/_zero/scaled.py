"""State in half precision with a scale for every piece of a parameter, so that none of its range is wasted.

A piece is stored divided by its scale, which makes its largest element half of the largest number of the dtype. An
update takes a bucket at a time to float32 and back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....ops.multi_tensor import make_lists, max_norm
from .arena import Arena
from .gradients import GradientSync
from .layout import LocalPiece
from .state import PARAM, Apply, in_slots
from .weights import Weights


class _Bucket:
    """This rank's shard of a bucket: its pieces, and the stretches they stand for, padding after them included."""

    def __init__(self, pieces: list[LocalPiece], first_row: int, size: int, device: torch.device) -> None:
        self.pieces = pieces
        self.rows = slice(first_row, first_row + len(pieces))
        self.size = size
        ends = [*(piece.offset for piece in pieces[1:]), size]
        starts = [0, *ends[:-1]]
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        self._lengths = torch.tensor(lengths, device=device)

    def spread(self, per_piece: Tensor) -> Tensor:
        """A value for every element from one for every piece."""
        return torch.repeat_interleave(per_piece, self._lengths, output_size=self.size)

    def pick(self, values: Tensor, pieces: Sequence[LocalPiece]) -> list[Tensor]:
        return [values[piece.offset : piece.offset + piece.size] for piece in pieces]


class ScaledState:
    """As `ArenaState`, with `scales`, float32 [pieces, 1 + names]: of the weights first."""

    def __init__(self, arena: Arena, names: Sequence[str]) -> None:
        self.arena = arena
        self.names = tuple(names)
        self._flats = {name: arena.new_shard(arena.dtypes.state) for name in (PARAM, *self.names)}
        self._buckets: list[_Bucket] = []
        row = 0
        for number, size in enumerate(arena.layout.shard_sizes):
            pieces = [piece for piece in arena.owned if piece.bucket == number]
            self._buckets.append(_Bucket(pieces, row, size, arena.device))
            row += len(pieces)
        self.scales = torch.zeros(row, len(self._flats), device=arena.device)
        self._largest = torch.finfo(arena.dtypes.state).max / 2
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
        given = dict(zip(((part.param, part.flat) for part in arena.parts), gradients.local(arena), strict=True))
        whole = {param: gradient for (param, _), gradient in given.items()} if arena.groups.is_one else {}
        for number, bucket in enumerate(self._buckets):
            if not bucket.pieces:
                continue
            wide = [self._unscaled(column, number) for column in range(len(self._flats))]
            for owner in dict.fromkeys(arena.owners[piece.param] for piece in bucket.pieces):
                pieces = [piece for piece in bucket.pieces if arena.owners[piece.param] == owner]
                if arena.groups.is_one:
                    parts = [whole[piece.param][piece.start : piece.stop] for piece in pieces]
                else:
                    shards = gradients.shards(arena)
                    parts = [shards[piece.flat : piece.flat + piece.size] for piece in pieces]
                weights, *state = (bucket.pick(values, pieces) for values in wide)
                function(owner, make_lists(in_slots(weights, parts, state)))
            arena.outgoing[number].copy_(wide[0])
            for column, values in enumerate(wide):
                self._store(column, number, values, noop)

    def _unscaled(self, column: int, number: int) -> Tensor:
        bucket = self._buckets[number]
        stored = self.arena.shard(list(self._flats.values())[column], number)
        return stored.float().mul_(bucket.spread(self.scales[bucket.rows, column]))

    def _store(self, column: int, number: int, values: Tensor, noop: Tensor | None = None) -> None:
        bucket = self._buckets[number]
        stored = self.arena.shard(list(self._flats.values())[column], number)
        before = self.scales[bucket.rows, column]
        largest = max_norm(bucket.pick(values, bucket.pieces), per_tensor=True)[1]
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
