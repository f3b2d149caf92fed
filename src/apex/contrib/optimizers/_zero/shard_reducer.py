"""Buckets of gradients reduced to the shards of ranks: what both optimizers with divided state do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...._distributed.collectives import Done, Work, all_reduce, reduce_scatter, reduce_scatter_all_reduce
from ...._distributed.reducer import BucketReducer
from ....ops._host import on_host
from .arena import Arena
from .groups import Groups

# What is said where other processes do not answer.
_ADDING = "adding up a bucket of gradients"


class ShardReducer(BucketReducer):
    """Sums, or with `average` means, over all processes of `groups`, of which each rank gets its shards.

    `scatter` and `reduce` are process groups that take turns with the buckets, for the reduce-scatter among ranks and
    the all-reduce over replicas, where these are not those of `groups` alone.
    """

    def __init__(
        self, groups: Groups, average: bool, scatter: tuple[Any, ...] = (), reduce: tuple[Any, ...] = ()
    ) -> None:
        self.arenas: list[Arena] = []
        super().__init__()
        self.groups = groups
        self.average = average
        # Of each bucket the number of its arena, and its own there.
        self._buckets: list[tuple[int, int]] = []
        # The first bucket of each arena.
        self._first: list[int] = []
        self._scatter = scatter or (groups.distributed,)
        self._all_reduce = reduce or (groups.redundant,)
        # Whether every process gets whole buckets: there is nobody to divide them with, or an option says so.
        self._gets_all = groups.ranks == 1
        self._stream: Any = None

    def _add(self, arena: Arena) -> None:
        """Adds an arena; a new round sends buckets in the order of the layouts."""
        self._first.append(len(self._buckets))
        self._buckets += [(len(self.arenas), number) for number in range(len(arena.layout.bucket_sizes))]
        self.arenas.append(arena)
        self._set_buckets({piece.param for piece in pieces} for arena in self.arenas for pieces in arena.layout.pieces)

    def make_buffer(self, arena: Arena) -> None:
        """Gives an arena a buffer for all its gradients."""
        if arena.gradient_buffer is None:
            arena.gradient_buffer = arena.new_buffer(arena.dtypes.gradients)

    def shards(self, arena: Arena) -> Tensor:
        """This rank's flat shard of the sums, after the end of a round; with more than one process."""
        if arena.gradient_shard is None:
            arena.gradient_shard = arena.new_shard(arena.dtypes.gradients)
        return arena.gradient_shard

    def _buckets_of(self, place: int, index: int) -> list[int]:
        """The buckets of a parameter, given by the number of its arena and its own in it."""
        first = self._first[place]
        return [first + number for number in self.arenas[place].layout.buckets_of[index]]

    def _reduce(self, bucket: int, values: Tensor, shard: Tensor, factor: Tensor | None = None) -> Work:
        """Starts the sum of a bucket's values, times each process's `factor`, of which `shard` becomes a part."""
        scatter = self._scatter[bucket % len(self._scatter)]
        reduce = self._all_reduce[bucket % len(self._all_reduce)]
        if self._gets_all:
            if shard.data_ptr() != values.data_ptr():
                shard.copy_(values)
            return Done() if self.groups.is_one else all_reduce(shard, reduce, _ADDING, self.average, factor)
        if self.groups.replicas == 1:
            return reduce_scatter(shard, values, scatter, self.average, _ADDING, factor)
        if self._stream is None and not on_host(values):
            self._stream = torch.Stream(values.device)
        return reduce_scatter_all_reduce(shard, values, (scatter, reduce), self.average, _ADDING, self._stream, factor)


def check_dense(gradient: Tensor) -> None:
    """Raises for a sparse gradient."""
    if gradient.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of a parameter of shape {tuple(gradient.shape)} is sparse; only dense ones are divided "
            "among processes: use sparse=False in embeddings"
        )
