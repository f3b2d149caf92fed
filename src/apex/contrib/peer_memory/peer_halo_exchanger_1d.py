"""PeerHaloExchanger1d: fills the margins of an image in place from the neighbouring ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .peer_memory import PeerMemoryPool


class PeerHaloExchanger1d:
    """A callable that fills a tensor's outer `half_halo` rows (or columns) from the neighbouring ranks."""

    def __init__(self, ranks: Sequence[int], rank_in_group: int, peer_pool: PeerMemoryPool, half_halo: int) -> None:
        if not 0 <= rank_in_group < len(ranks):
            raise ValueError(f"rank_in_group={rank_in_group} is not one of the {len(ranks)} places of ranks")
        if half_halo < 1:
            raise ValueError(f"half_halo={half_halo}: at least one row is needed")
        self.peer_group_size, self.ranks, self.peer_rank = len(ranks), list(ranks), rank_in_group
        self.low_neighbor, self.high_neighbor = rank_in_group - 1, (rank_in_group + 1) % len(ranks)
        self.low_zero, self.high_zero = rank_in_group == 0, rank_in_group == len(ranks) - 1
        self.peer_pool, self.half_halo = peer_pool, half_halo
        sides = (self.low_zero, self.low_neighbor), (self.high_zero, self.high_neighbor)
        self._neighbours = [-1 if zero else peer_pool.peer_ranks.index(ranks[index]) for zero, index in sides]

    def __call__(
        self, y: Tensor, H_split: bool = True, explicit_nhwc: bool = False, numSM: int = 0, diagnostics: bool = False
    ) -> None:
        """Fill the margins of `y`, [N, C, H, W] or [N, H, W, C], which includes them; margins at an edge become zero.

        `numSM` and `diagnostics` are accepted and not used.
        """
        dim = 4 - (2 if H_split else 1) - (1 if explicit_nhwc else 0)
        half = self.half_halo
        if y.dim() != 4 or y.shape[dim] < 3 * half:
            raise ValueError(f"y has shape {list(y.shape)}; dimension {dim} needs at least 3 * half_halo = {3 * half}")
        size = y.shape[dim]
        halos = [y.narrow(dim, start, half) for start in (half, size - 2 * half, 0, size - half)]
        self.peer_pool.exchange_halos(halos[:2], halos[2:], self._neighbours)
