"""Halo exchangers: a rank sends its outer rows to the ranks above (left) and below (right) and receives theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ..._distributed import exchange
from ..._distributed.collectives import wait_for
from ..._distributed.neighbours import exchange_by_messages, group_of
from ...ops._device import on_stream
from ..peer_memory import PeerMemoryPool


def _stream() -> Any:
    """Return a new stream of the accelerator, or None if there is no accelerator."""
    if not torch.accelerator.is_available():
        return None
    return torch.Stream(device=torch.accelerator.current_accelerator())


class HaloExchanger:
    """Base class of the halo exchangers.

    `ranks` are ordered from top to bottom. A neighbour of -1 stands for the edge of the image, whose halo is zeros.
    """

    def __init__(self, ranks: Sequence[int], rank_in_group: int) -> None:
        size = len(ranks)
        if not 0 <= rank_in_group < size:
            raise ValueError(f"rank_in_group={rank_in_group} is not one of the {size} places of ranks={list(ranks)}")
        if dist.is_initialized() and ranks[rank_in_group] != dist.get_rank():
            raise ValueError(
                f"rank_in_group={rank_in_group} of ranks={list(ranks)} is not this rank, {dist.get_rank()}"
            )
        self.stream1, self.stream2, self.stream3 = _stream(), _stream(), _stream()
        self.group_size, self.ranks, self.rank_in_group = size, list(ranks), rank_in_group
        self.wrap_around_left_rank_in_group = (rank_in_group - 1) % size
        self.wrap_around_right_rank_in_group = (rank_in_group + 1) % size
        self.left_zero, self.right_zero = rank_in_group == 0, rank_in_group == size - 1
        self.left_rank = -1 if self.left_zero else ranks[rank_in_group - 1]
        self.right_rank = -1 if self.right_zero else ranks[rank_in_group + 1]

    def left_right_halo_exchange(
        self,
        left_output_halo: Tensor,
        right_output_halo: Tensor,
        left_input_halo: Tensor | None = None,
        right_input_halo: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Send the output halos and receive the neighbours' halos.

        Received halos are written into the input halos if these are given; otherwise they are returned.
        """
        if (left_input_halo is None) != (right_input_halo is None):
            raise ValueError("left_input_halo and right_input_halo must both be given, or neither")
        sent = left_output_halo, right_output_halo
        if left_input_halo is None or right_input_halo is None:
            received = torch.empty_like(left_output_halo), torch.empty_like(right_output_halo)
        else:
            received = left_input_halo, right_input_halo
        kinds = [(list(halo.shape), halo.dtype) for halo in (*sent, *received)]
        if kinds.count(kinds[0]) < 4:
            raise ValueError(f"halos must have one shape and dtype, got {', '.join(map(str, kinds))}")
        self._exchange(sent, received)
        return received if left_input_halo is None else None

    def _exchange(self, sent: tuple[Tensor, Tensor], received: tuple[Tensor, Tensor]) -> None:
        raise NotImplementedError(f"{type(self).__name__} does not say how halos are exchanged")


class HaloExchangerNoComm(HaloExchanger):
    """A halo exchanger that returns a rank's own halos, the left one on the right: wrong results, for timings only."""

    def _exchange(self, sent: tuple[Tensor, Tensor], received: tuple[Tensor, Tensor]) -> None:
        received[0].copy_(sent[1])
        received[1].copy_(sent[0])


class HaloExchangerAllGather(HaloExchanger):
    """A halo exchanger that gathers all halos on every rank; `comm` is the process group of `ranks`, in their order."""

    def __init__(self, ranks: Sequence[int], rank_in_group: int, comm: Any) -> None:
        super().__init__(ranks, rank_in_group)
        if comm is not None and dist.get_process_group_ranks(comm) != self.ranks:
            raise ValueError(f"comm has ranks {dist.get_process_group_ranks(comm)}, expected ranks={self.ranks}")
        self.comm = group_of(ranks) if comm is None else comm

    def _exchange(self, sent: tuple[Tensor, Tensor], received: tuple[Tensor, Tensor]) -> None:
        outer = torch.zeros_like(sent[0])
        all_sent = exchange.gather(torch.stack(sent), self.comm, "halos") if self.group_size > 1 else sent
        halos = [outer, *all_sent, outer]  # the left and right halo of rank 0, of rank 1, ... between two edges
        received[0].copy_(halos[2 * self.rank_in_group])
        received[1].copy_(halos[2 * self.rank_in_group + 3])


class HaloExchangerSendRecv(HaloExchanger):
    """A halo exchanger by messages between neighbours, in a process group made for it."""

    def __init__(self, ranks: Sequence[int], rank_in_group: int) -> None:
        super().__init__(ranks, rank_in_group)
        self.group = group_of(ranks)

    def _exchange(self, sent: tuple[Tensor, Tensor], received: tuple[Tensor, Tensor]) -> None:
        exchange_by_messages(sent, received, (self.left_rank, self.right_rank), self.group)


class HaloExchangerPeer(HaloExchanger):
    """A halo exchanger that writes into the neighbours' memory. `explicit_nhwc` and `numSM` are not used."""

    def __init__(
        self, ranks: Sequence[int], rank_in_group: int, peer_pool: PeerMemoryPool, explicit_nhwc: bool, numSM: int = 0
    ) -> None:
        super().__init__(ranks, rank_in_group)
        self.peer_pool, self.explicit_nhwc, self.numSM, self.diagnostics = peer_pool, explicit_nhwc, numSM, False
        neighbours = self.left_rank, self.right_rank
        self._neighbours = [rank if rank < 0 else peer_pool.peer_ranks.index(rank) for rank in neighbours]

    def _exchange(self, sent: tuple[Tensor, Tensor], received: tuple[Tensor, Tensor]) -> None:
        self.peer_pool.exchange_halos(sent, received, self._neighbours)


class HaloPadder:
    """A callable that pads images with `half_halo` rows (or columns) of the neighbouring ranks; see `wait`.

    It is for autograd Functions, such as SpatialBottleneck's: autograd alone would not send the halos' gradients back.
    """

    def __init__(self, halo_ex: HaloExchanger) -> None:
        self.halo_ex = halo_ex

    def __call__(self, y: Tensor, half_halo: int, explicit_nhwc: bool, H_split: bool) -> Tensor:
        """Return a padded copy of [N, C, H, W] or [N, H, W, C] in the same layout; it is complete after `wait`."""
        if y.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "y requires a gradient, but halos' gradients would not be sent back to the neighbours: call HaloPadder "
                "in a torch.autograd.Function that exchanges them, or use SpatialBottleneck"
            )
        dim = 4 - (2 if H_split else 1) - (1 if explicit_nhwc else 0)
        if y.dim() != 4 or not 1 <= half_halo <= y.shape[dim]:
            raise ValueError(f"y has shape {list(y.shape)}; dimension {dim} cannot give half_halo={half_halo}")
        size = y.shape[dim]
        padded = functional.pad(y, [0, 0] * (3 - dim) + [half_halo, half_halo])
        halos = [padded.narrow(dim, start, half_halo) for start in (half_halo, size, 0, size + half_halo)]
        with on_stream(self.halo_ex.stream1):
            self.halo_ex.left_right_halo_exchange(*halos)
        return padded

    def wait(self) -> None:
        """Make all work queued from now on wait for the exchange."""
        wait_for(self.halo_ex.stream1)
