"""State in half precision with a scale for every piece of a parameter, so that none of its range is wasted.

A piece is stored divided by its scale, which makes its largest element half of the largest number of the dtype. An
update takes a bucket at a time to float32 and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ....ops.multi_tensor import Lists, make_lists, max_norm, rules
from ....ops.multi_tensor.tables import current_stream
from ....ops.multi_tensor.triton_lists import TritonLists
from .arena import Arena
from .gradients import GradientSync
from .layout import Piece, cuts
from .state import PARAM, Apply, in_slots
from .weights import Weights


class _Bucket:
    """This rank's shard of a bucket: its pieces, and the lists of them, which stay where they are."""

    def __init__(self, pieces: list[Piece], arena: Arena, first_row: int, stored: list[Tensor], wide: Tensor) -> None:
        """`stored` has the shard of weights and state, `wide` a row of memory to work in for each of them."""
        self.pieces = pieces
        self.rows = slice(first_row, first_row + len(pieces))
        self._cuts = cuts([(piece.offset, piece.size) for piece in pieces], wide.shape[1])
        self.wide = list(wide)
        self._narrow_pieces = list(map(self.cut, stored))
        self._wide_pieces = list(map(self.cut, self.wide))
        self._stream: int | None = None
        # By parameter group: which pieces belong to it; lists of them, and the dtype of gradients that they are for.
        self.members: dict[int, list[int]] = {}
        for number, piece in enumerate(pieces):
            self.members.setdefault(arena.group_of[piece.param], []).append(number)
        self._updates: dict[int, tuple[torch.dtype, Lists]] = {}

    def cut(self, values: Tensor) -> list[Tensor]:
        """The elements of each piece."""
        return list(values.split(self._cuts)[1::2])

    def refresh(self, stream: int) -> None:
        """Makes lists anew for another stream."""
        if stream != self._stream:
            pairs = list(zip(self._narrow_pieces, self._wide_pieces, strict=True))
            self._to_wide = [make_lists((wide, narrow, None, None, None)) for narrow, wide in pairs]
            self._to_narrow = [make_lists((narrow, wide, None, None, None)) for narrow, wide in pairs]
            self._updates.clear()
            self._stream = stream

    def unscale(self, scales: Tensor) -> None:
        """Fills the float32 working memory from what is stored."""
        for column, lists in enumerate(self._to_wide):
            lists.apply(rules.SCALE_EACH, {}, whole=_twice(scales[self.rows, column]))

    def store(self, column: int, scales: Tensor, limit: float, noop: Tensor | None = None) -> None:
        """Stores the working memory, with new scales that make the largest element `limit`."""
        before = scales[self.rows, column]
        scale = max_norm(self._wide_pieces[column], per_tensor=True)[1] / limit
        inverse = torch.where(scale > 0, scale.reciprocal(), 0.0)
        self._to_narrow[column].apply(rules.SCALE_EACH, {}, whole=_twice(inverse), noop=noop)
        before.copy_(scale if noop is None else torch.where(noop.reshape(()) != 0, before, scale))

    def lists_of(self, group: int, gradients: list[Tensor]) -> Lists:
        """The lists of a parameter group, for the pieces' gradients."""
        members = self.members[group]
        given = [gradients[member] for member in members]
        known = self._updates.get(group)
        if known is not None and known[0] == given[0].dtype and isinstance(known[1], TritonLists):
            known[1].table.update_moving(list(map(Tensor.data_ptr, given)))
            return known[1]
        weights, *state = ([pieces[member] for member in members] for pieces in self._wide_pieces)
        lists = make_lists(in_slots(weights, given, state))
        self._updates[group] = given[0].dtype, lists
        return lists


def _twice(factors: Tensor) -> Tensor:
    """One number per tensor in the two columns that a rule's `whole` has."""
    return torch.stack((factors, factors), 1)


class ScaledState:
    """As `ArenaState`, with `scales`, float32 [pieces, 1 + names]: of the weights first.

    A shard of the largest bucket in float32, for the weights and each name, is kept to work in.
    """

    def __init__(self, arena: Arena, names: Sequence[str]) -> None:
        self.arena = arena
        self.names = tuple(names)
        self._flats = {name: arena.new_shard(arena.dtypes.state) for name in (PARAM, *self.names)}
        longest = max(arena.layout.shard_sizes, default=0)
        wide = torch.zeros(len(self._flats), longest, dtype=torch.float32, device=arena.device)
        self._buckets: list[_Bucket] = []
        row = 0
        for number, size in enumerate(arena.layout.shard_sizes):
            pieces = [piece for piece in arena.owned if piece.bucket == number]
            stored = [arena.shard(values, number) for values in self._flats.values()]
            self._buckets.append(_Bucket(pieces, arena, row, stored, wide[:, :size]))
            row += len(pieces)
        self.scales = torch.zeros(row, len(self._flats), dtype=torch.float32, device=arena.device)
        self._limit = torch.finfo(arena.dtypes.state).max / 2
        self._params = Weights(arena)
        self.write(PARAM, self._params.gather(arena.new_shard(torch.float32)))
        self.connect()

    def connect(self) -> None:
        """Called when parameters have become views of a buffer."""
        self._params.make_outgoing()

    def _filled_buckets(self) -> Iterator[tuple[int, _Bucket]]:
        stream = current_stream(self.arena.device)
        for number, bucket in enumerate(self._buckets):
            if bucket.pieces:
                bucket.refresh(stream)
                yield number, bucket

    @torch.no_grad()
    def apply(self, gradients: GradientSync, function: Apply, noop: Tensor | None = None) -> None:
        """Calls `function` for every bucket and parameter group; it is to do nothing where `noop` is set."""
        arena = self.arena
        whole = dict(zip((part.param for part in arena.parts), gradients.local(arena), strict=True))
        for number, bucket in self._filled_buckets():
            bucket.unscale(self.scales)
            if arena.groups.is_one:
                given = [whole[piece.param][piece.start : piece.stop] for piece in bucket.pieces]
            else:
                given = bucket.cut(arena.shard(gradients.shards(arena), number))
            for group in bucket.members:
                function(group, bucket.lists_of(group, given))
            sent, updated = arena.outgoing[number], bucket.wide[0]
            sent.copy_(updated if noop is None else torch.where(noop.reshape(()) != 0, sent.float(), updated))
            for column in range(len(self._flats)):
                bucket.store(column, self.scales, self._limit, noop)

    def read(self, name: str) -> Tensor:
        """A flat shard in float32: of `PARAM` or of one of `names`."""
        column = list(self._flats).index(name)
        values = self.arena.new_shard(torch.float32)
        for number, bucket in self._filled_buckets():
            bucket.unscale(self.scales)
            self.arena.shard(values, number).copy_(bucket.wide[column])
        return values

    @torch.no_grad()
    def write(self, name: str, values: Tensor) -> None:
        """Takes the values of a flat shard. The parameters, which are less coarse, stay what they are."""
        column = list(self._flats).index(name)
        for number, bucket in self._filled_buckets():
            bucket.wide[column].copy_(self.arena.shard(values, number))
            bucket.store(column, self.scales, self._limit)
        if name == PARAM and self.arena.outgoing:
            present = self._params.gather(self.arena.new_shard(self.arena.dtypes.parameters))
            for outgoing, value in zip(self.arena.outgoing, self.arena.shards(present), strict=True):
                outgoing.copy_(value)

    def shards(self) -> dict[str, Tensor]:
        """All flat shards that stay from step to step, under the names that buckets have them under."""
        named = {f"{name}_shard": self._flats[name] for name in self.names}
        return {"params_shard": self._flats[PARAM], **named}
