"""State in half precision with a scale for every piece of a parameter, which uses the whole range of the dtype.

A piece is stored divided by its scale, so that its largest element is half of the dtype's largest number. An update
converts one bucket at a time to float32 and back.
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


class _ScaledShard:
    """This rank's shard of one bucket: its pieces, and lists of tensors for the rules that update them."""

    def __init__(self, pieces: list[Piece], arena: Arena, first_row: int, stored: list[Tensor], wide: Tensor) -> None:
        """Make the shard; `stored` has its weights and state, `wide` a float32 row to work in for each of them."""
        self.pieces = pieces
        self.rows = slice(first_row, first_row + len(pieces))
        self._cuts = cuts([(piece.offset, piece.size) for piece in pieces], wide.shape[1])
        self.wide = list(wide)
        self._narrow_pieces = list(map(self.cut, stored))
        self._wide_pieces = list(map(self.cut, self.wide))
        self._stream: int | None = None
        # By parameter group: the indices of its pieces; their lists, with the dtype of the lists' gradients.
        self.members: dict[int, list[int]] = {}
        for number, piece in enumerate(pieces):
            self.members.setdefault(arena.group_of[piece.param], []).append(number)
        self._updates: dict[int, tuple[torch.dtype, Lists]] = {}

    def cut(self, values: Tensor) -> list[Tensor]:
        """Return views of the parameters' pieces in `values`, a tensor of the shard's size, without the gaps."""
        return list(values.split(self._cuts)[1::2])

    def refresh(self, stream: int) -> None:
        """Make the lists again if the current stream has changed."""
        if stream != self._stream:
            pairs = list(zip(self._narrow_pieces, self._wide_pieces, strict=True))
            self._to_wide = [make_lists((wide, narrow, None, None, None)) for narrow, wide in pairs]
            self._to_narrow = [make_lists((narrow, wide, None, None, None)) for narrow, wide in pairs]
            self._updates.clear()
            self._stream = stream

    def unscale(self, scales: Tensor) -> None:
        """Fill the float32 working memory with the stored values times their scales."""
        for column, lists in enumerate(self._to_wide):
            lists.apply(rules.SCALE_EACH, {}, whole=_twice(scales[self.rows, column]))

    def store(self, column: int, scales: Tensor, limit: float, noop: Tensor | None = None) -> None:
        """Store a column of the working memory, with new scales that make each piece's largest element `limit`."""
        before = scales[self.rows, column]
        scale = max_norm(self._wide_pieces[column], per_tensor=True)[1] / limit
        inverse = torch.where(scale > 0, scale.reciprocal(), 0.0)
        self._to_narrow[column].apply(rules.SCALE_EACH, {}, whole=_twice(inverse), noop=noop)
        before.copy_(scale if noop is None else torch.where(noop.reshape(()) != 0, before, scale))

    def lists_of(self, group: int, gradients: list[Tensor]) -> Lists:
        """Return the lists of a parameter group; `gradients` has the gradients of all pieces."""
        members = self.members[group]
        own = [gradients[member] for member in members]
        known = self._updates.get(group)
        if known is not None and known[0] == own[0].dtype and isinstance(known[1], TritonLists):
            known[1].table.update_moving(list(map(Tensor.data_ptr, own)))
            return known[1]
        weights, *state = ([pieces[member] for member in members] for pieces in self._wide_pieces)
        lists = make_lists(in_slots(weights, own, state))
        self._updates[group] = own[0].dtype, lists
        return lists


def _twice(factors: Tensor) -> Tensor:
    """Return the `whole` argument of an update rule, [tensors, 2]: each tensor's factor in both columns."""
    return torch.stack((factors, factors), 1)


class ScaledState:
    """An `ArenaState` in half precision; `names` are the kinds of state beside the weights, such as moments.

    `scales`, float32 [pieces, 1 + number of names], has the weights first. Each column has a float32 shard to work in.
    """

    def __init__(self, arena: Arena, names: Sequence[str]) -> None:
        self.arena = arena
        self.names = tuple(names)
        self._flats = {name: arena.new_shard(arena.dtypes.state) for name in (PARAM, *self.names)}
        longest = max(arena.layout.shard_sizes, default=0)
        wide = torch.zeros(len(self._flats), longest, dtype=torch.float32, device=arena.device)
        self._shards: list[_ScaledShard] = []
        row = 0
        for number, size in enumerate(arena.layout.shard_sizes):
            pieces = [piece for piece in arena.owned if piece.bucket == number]
            stored = [arena.shard(values, number) for values in self._flats.values()]
            self._shards.append(_ScaledShard(pieces, arena, row, stored, wide[:, :size]))
            row += len(pieces)
        self.scales = torch.zeros(row, len(self._flats), dtype=torch.float32, device=arena.device)
        self._limit = torch.finfo(arena.dtypes.state).max / 2
        self._params = Weights(arena)
        self.write(PARAM, self._params.gather(arena.new_shard(torch.float32)))
        self.connect()

    def connect(self) -> None:
        """Make the outgoing shards again, because parameters have become views of a buffer."""
        self._params.make_outgoing()

    def _filled_shards(self) -> Iterator[tuple[int, _ScaledShard]]:
        """Yield the bucket number and shard of every bucket that this rank has pieces of."""
        stream = current_stream(self.arena.device)
        for number, shard in enumerate(self._shards):
            if shard.pieces:
                shard.refresh(stream)
                yield number, shard

    @torch.no_grad()
    def apply(self, gradients: GradientSync, function: Apply, noop: Tensor | None = None) -> None:
        """Call `function` for every bucket and parameter group; it must change nothing if `noop` is set."""
        arena = self.arena
        whole = dict(zip((part.param for part in arena.parts), gradients.local(arena), strict=True))
        for number, shard in self._filled_shards():
            shard.unscale(self.scales)
            if arena.groups.is_one:
                piece_gradients = [whole[piece.param][piece.start : piece.stop] for piece in shard.pieces]
            else:
                piece_gradients = shard.cut(arena.shard(gradients.shards(arena), number))
            for group in shard.members:
                function(group, shard.lists_of(group, piece_gradients))
            sent, updated = arena.outgoing[number], shard.wide[0]
            sent.copy_(updated if noop is None else torch.where(noop.reshape(()) != 0, sent.float(), updated))
            for column in range(len(self._flats)):
                shard.store(column, self.scales, self._limit, noop)

    def read(self, name: str) -> Tensor:
        """Return the flat shard of `PARAM` or of one of `names`, in float32."""
        column = list(self._flats).index(name)
        values = self.arena.new_shard(torch.float32)
        for number, shard in self._filled_shards():
            shard.unscale(self.scales)
            self.arena.shard(values, number).copy_(shard.wide[column])
        return values

    @torch.no_grad()
    def write(self, name: str, values: Tensor) -> None:
        """Set the values of a flat shard. Parameters keep their values, which the stored ones only approximate."""
        column = list(self._flats).index(name)
        for number, shard in self._filled_shards():
            shard.wide[column].copy_(self.arena.shard(values, number))
            shard.store(column, self.scales, self._limit)
        if name == PARAM and self.arena.outgoing:
            present = self._params.gather(self.arena.new_shard(self.arena.dtypes.parameters))
            for outgoing, value in zip(self.arena.outgoing, self.arena.shards(present), strict=True):
                outgoing.copy_(value)

    def shards(self) -> dict[str, Tensor]:
        """Return all lasting flat shards, by their names in `StateBucket`."""
        named = {f"{name}_shard": self._flats[name] for name in self.names}
        return {"params_shard": self._flats[PARAM], **named}
