"""Muon's matrices that are sharded over processes (DTensor).

The directions of a bucket's shards are exchanged: every matrix becomes whole in one process (`RowExchange`), or in all
of them (`FullMatrices`), is made orthogonal there, and its parts go back to the processes that hold them. If a shard
consists of whole matrices, such as experts, nothing is sent.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._distributed import collectives
from .._distributed.shards import cut_dimensions, distributed_like, local

logger = logging.getLogger("apex.optimizers")

_WHAT = "exchanging Muon's directions"


def divided(
    params: Sequence[Tensor], blocks: Sequence[Sequence[Any]], first: int
) -> tuple[list[int], list[RowExchange | FullMatrices]]:
    """Return the indices of parameters whose matrices are whole in every shard, and exchanges for the others.

    `blocks` are the blocks of each parameter, see `_muon_directions.Block`. `first` is the rank that is preferred if
    several have equal work.
    """
    whole: list[int] = []
    exchanged: dict[int, tuple[Any, list[int]]] = {}
    for index, param in enumerate(params):
        if has_whole_matrices(param, blocks[index][0].rows, blocks[index][0].columns):
            whole.append(index)
            continue
        if not local(param).is_contiguous():
            raise ValueError(
                f"the shard of a parameter of shape {list(param.shape)} has strides {local(param).stride()}; make the "
                "parameter contiguous before it is sharded"
            )
        cut = cut_dimensions(param)
        group = cut[0][0] if len(cut) == 1 and cut[0][1] == 0 else None
        exchanged.setdefault(id(group), (group, []))[1].append(index)
    exchanges: list[RowExchange | FullMatrices] = []
    for group, indices in exchanged.values():
        chosen = [params[index] for index in indices]
        if group is None:
            exchanges.append(FullMatrices(indices, chosen))
        else:
            work = [sum(block.work for block in blocks[index]) for index in indices]
            exchanges.append(RowExchange(indices, chosen, work, group, first))
    return whole, exchanges


def has_whole_matrices(param: Tensor, rows: int, columns: int) -> bool:
    """Return whether no matrix of a parameter, of `rows` x `columns`, is cut; True for a plain tensor."""
    cut = cut_dimensions(param)
    if any(dimension for _, dimension in cut):
        return False
    is_stack = param.dim() == 3 and rows <= param.shape[1] and columns == param.shape[2]  # such as of experts
    if not cut or is_stack:
        return True
    # Heads lie one after the other, so a shard has whole ones if its number of rows is a multiple of a head's.
    ranks = dist.get_world_size(cut[0][0])
    return len(cut) == 1 and rows_of_shard(param.shape[0], ranks, 0) % max(1, rows) == 0


def rows_of_shard(rows: int, ranks: int, rank: int) -> int:
    """Return the number of rows of a DTensor with placement Shard(0) that a rank holds."""
    most = -(-rows // ranks)
    return min(most, max(0, rows - rank * most))


def owners_of(costs: Sequence[int], ranks: int, first: int = 0) -> list[int]:
    """Return an owner for each matrix: the most expensive ones first, each to the rank with the least work so far.

    Among ranks with equal work, rank `first` comes first.
    """
    work = [0] * ranks
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owner = min(range(ranks), key=lambda rank: (work[rank], (rank - first) % ranks))
        owners[index] = owner
        work[owner] += costs[index]
    return owners


def _stacked(
    memory: Tensor, indices: Sequence[int], params: Sequence[Tensor], shapes: Sequence[Any]
) -> list[tuple[int, Tensor]]:
    """Cut memory into matrices of parameters; return, for each run of equal shapes, its first index and the matrices.

    The matrices of a run are a tensor [parameters, elements].
    """
    stacks, start = [], 0
    for _, run in itertools.groupby(indices, key=lambda index: shapes[index]):
        members = list(run)
        size = params[members[0]].numel()
        stacks.append((members[0], memory[start : start + size * len(members)].view(len(members), size)))
        start += size * len(members)
    return stacks


class RowExchange:
    """Directions of matrices whose rows are cut over one process group.

    Every matrix has an owner. One all-to-all brings its rows there, and one brings them back. `views` has this
    process's rows of every parameter, as vectors that are sent without a copy. `stacks` has the matrices that this
    process owns, see `_stacked`. `indices` are the numbers of the parameters in their bucket, `shapes` the shapes that
    sort them.
    """

    def __init__(
        self,
        indices: Sequence[int],
        params: Sequence[Tensor],
        costs: Sequence[int],
        group: Any,
        first: int,
        shapes: Sequence[Any] | None = None,
    ) -> None:
        self.indices, self._params, self._group = list(indices), list(params), group
        self._shapes = [tuple(param.shape) for param in params] if shapes is None else shapes
        self._division = costs, group, first, self._shapes
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        owners = owners_of(costs, ranks, first)
        # In the order of sending. Matrices of one shape are neighbours, so that one batched iteration takes them all.
        self._order = sorted(range(len(params)), key=lambda index: (owners[index], self._shapes[index], index))
        self._owned = [index for index in self._order if owners[index] == rank]
        self._shards = [local(param).numel() for param in params]
        self._sent = [0] * ranks
        for index, owner in enumerate(owners):
            self._sent[owner] += self._shards[index]
        # Elements of each owned matrix that each rank holds.
        owned = [params[index] for index in self._owned]
        widths = [param.numel() // max(1, param.shape[0]) for param in owned]
        self._parts = [
            [rows_of_shard(param.shape[0], ranks, each) * width for param, width in zip(owned, widths, strict=True)]
            for each in range(ranks)
        ]
        self._received = list(map(sum, self._parts))
        self.elements = sum(self._sent) + 2 * sum(self._received)

    def of_rows(self, tensors: Sequence[Tensor]) -> RowExchange:
        """Return an exchange of tensors with a number for each row, which go where the matrices go."""
        return RowExchange(self.indices, tensors, *self._division)

    def bind(self, memory: Tensor) -> None:
        """Use `memory`, a vector of `elements` elements."""
        sizes = [sum(self._sent), sum(self._received), sum(self._received)]
        self._outgoing, self._incoming, matrices = memory.split(sizes)
        sent = self._outgoing.split([self._shards[index] for index in self._order])
        self.views = [view for _, view in sorted(zip(self._order, sent, strict=True), key=lambda pair: pair[0])]
        self.stacks = _stacked(matrices, self._owned, self._params, self._shapes)
        whole = [matrix for _, stack in self.stacks for matrix in stack]
        # For copies between received rows, ordered by sender, and the rows of each matrix.
        pieces = self._incoming.split([size for sizes in self._parts for size in sizes])
        places = zip(
            *(matrix.split(list(sizes)) for matrix, sizes in zip(whole, zip(*self._parts, strict=True), strict=True)),
            strict=True,
        )
        pairs = [pair for pair in zip(pieces, itertools.chain.from_iterable(places), strict=True) if pair[0].numel()]
        self._pieces, self._places = [piece for piece, _ in pairs], [place for _, place in pairs]

    def gather(self) -> None:
        """Bring all rows of every matrix to its owner."""
        collectives.all_to_all(self._incoming, self._outgoing, self._received, self._sent, self._group, _WHAT).wait()
        if self._places:
            torch._foreach_copy_(self._places, self._pieces)

    def scatter(self) -> None:
        """Send the rows of every matrix back to the processes that hold them."""
        if self._places:
            torch._foreach_copy_(self._pieces, self._places)
        collectives.all_to_all(self._outgoing, self._incoming, self._sent, self._received, self._group, _WHAT).wait()


class FullMatrices:
    """Directions of parameters that are cut in columns, or over several dimensions of a mesh.

    Every process gets every matrix and makes it orthogonal, which takes more memory and time than `RowExchange`.
    """

    _warned = False

    def __init__(self, indices: Sequence[int], params: Sequence[Tensor], shapes: Sequence[Any] | None = None) -> None:
        self.indices = list(indices)
        self._params: list[Any] = list(params)
        self._shapes = [tuple(param.shape) for param in params] if shapes is None else shapes
        self._shards = [local(param).numel() for param in params]
        self.elements = sum(self._shards) + sum(param.numel() for param in params)
        if not FullMatrices._warned:
            FullMatrices._warned = True
            logger.warning(
                "FusedMuon gathers matrices distributed as %s in every process; only matrices with a single Shard(0) "
                "placement, as fully_shard makes them, are divided among processes",
                self._params[0].placements,
            )

    def of_rows(self, tensors: Sequence[Tensor]) -> FullMatrices:
        """Return an exchange of tensors with a number for each row."""
        return FullMatrices(self.indices, tensors, self._shapes)

    def bind(self, memory: Tensor) -> None:
        """Use `memory`, a vector of `elements` elements."""
        *views, matrices = memory.split([*self._shards, self.elements - sum(self._shards)])
        self.views = views
        order = sorted(range(len(self._params)), key=lambda index: self._shapes[index])
        self.stacks = _stacked(matrices, order, self._params, self._shapes)
        whole = [matrix for _, stack in self.stacks for matrix in stack]
        self._whole = [(self._params[index], views[index], matrix) for index, matrix in zip(order, whole, strict=True)]

    def gather(self) -> None:
        """Bring every matrix to every process."""
        for param, view, whole in self._whole:
            shards: Any = distributed_like(param, view.view(local(param).shape))
            whole.copy_(shards.full_tensor().reshape(-1))

    def scatter(self) -> None:
        """Copy this process's shards out of the matrices."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        for param, view, whole in self._whole:
            shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
            if view.numel():
                slices = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
                view.view(local(param).shape).copy_(whole.view(param.shape)[slices])
