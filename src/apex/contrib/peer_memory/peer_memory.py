"""PeerMemoryPool: memory of every rank of a machine that all its ranks can read and write."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..._distributed.neighbours import exchange_by_messages
from ..._distributed.peer_memory import PeerMemory

_ALIGNMENT = 256  # bytes; sizes and offsets are multiples of it


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class PeerMemoryPool:
    """A pool of bytes on each of `peer_ranks`: a static part, and a dynamic part that `reset` frees.

    All peers must allocate in the same order.
    """

    def __init__(self, static_size: int, dynamic_size: int, peer_ranks: Sequence[int] | None = None) -> None:
        for name, size in (("static_size", static_size), ("dynamic_size", dynamic_size)):
            if size < 0:
                raise ValueError(f"{name}={size}: at least 0 bytes are needed")
        if peer_ranks is None:
            peer_ranks = range(dist.get_world_size()) if dist.is_initialized() else [0]
        self.static_size, self.dynamic_size = _aligned(static_size), _aligned(dynamic_size)
        self.static_offset = self.dynamic_offset = 0
        self.alignment = _ALIGNMENT
        self.peer_ranks = list(peer_ranks)
        self.memory = PeerMemory(max(_ALIGNMENT, self.static_size + self.dynamic_size), self.peer_ranks)
        self.peer_rank = self.memory.index

    def reset(self) -> None:
        """Free the dynamic part: its memory may be allocated again."""
        self.dynamic_offset = 0

    def allocate_peer_tensors(
        self, shape: Sequence[int], dtype: torch.dtype, channels_last: bool, dynamic: bool
    ) -> list[Tensor]:
        """Allocate a tensor on every peer and return them, indexed by peer. `channels_last` needs four dimensions."""
        count = math.prod(shape) * dtype.itemsize
        part = "dynamic" if dynamic else "static"
        size, start = getattr(self, f"{part}_size"), getattr(self, f"{part}_offset")
        if start + _aligned(count) > size:
            raise RuntimeError(
                f"a tensor {list(shape)} of {dtype} needs {_aligned(count)} bytes, but of the pool's {size} {part} "
                f"bytes {size - start} are left; make it with a larger {part}_size"
                + (", or call reset() after every step" if dynamic else "")
            )
        pieces = self.memory.bytes_of(start + (self.static_size if dynamic else 0), count)
        tensors = [laid_out(piece, shape, dtype, channels_last) for piece in pieces]
        setattr(self, f"{part}_offset", start + _aligned(count))
        for index, tensor in enumerate(tensors):
            tensor.peer = self.memory, index  # type: ignore[attr-defined]  # for push_pull_halos_1d
        return tensors

    def exchange_halos(self, sent: Sequence[Tensor], received: Sequence[Tensor], neighbours: Sequence[int]) -> None:
        """Send two halos to the peers at the two indices `neighbours` and fill `received` with theirs.

        An index of -1 is an edge of the image: the received halo is zeros.
        """
        if self.memory.problem is not None:
            ranks = [index if index < 0 else self.peer_ranks[index] for index in neighbours]
            exchange_by_messages(sent, received, ranks, self.memory.group)
            return
        start = self.dynamic_offset
        try:
            # Both halos are allocated even at an edge: all peers must agree on offsets.
            buffers = [self.allocate_peer_tensors(halo.shape, halo.dtype, False, True) for halo in sent]
        finally:
            self.dynamic_offset = start
        left, right = buffers
        own = self.peer_rank
        push_pull(
            self.memory,
            (sent[0], left[own], right[neighbours[0]], received[0], neighbours[0]),
            (sent[1], right[own], left[neighbours[1]], received[1], neighbours[1]),
        )


def laid_out(memory: Tensor, shape: Sequence[int], dtype: torch.dtype, channels_last: bool) -> Tensor:
    """View bytes as a tensor of the given shape, dtype and layout."""
    if not channels_last:
        return memory.view(dtype).view(*shape)
    if len(shape) != 4:
        raise ValueError(f"shape={list(shape)}: channels_last needs four dimensions")
    n, c, h, w = shape
    return memory.view(dtype).view(n, h, w, c).movedim(-1, 1)


def push_pull(memory: PeerMemory, *sides: tuple[Tensor, Tensor, Tensor, Tensor, int]) -> None:
    """Write halos into the neighbours' buffers, synchronise with these peers, and read the halos they wrote.

    A side is (halo to send, own buffer, neighbour's buffer, halo to fill, the peer's index or -1 at an edge).
    """
    others = [index for *_, index in sides if index >= 0]
    for sent, _, neighbour_buffer, _, index in sides:
        if index >= 0:
            neighbour_buffer.copy_(sent)
    memory.meet(others)
    for _, own_buffer, _, received, index in sides:
        received.copy_(own_buffer) if index >= 0 else received.zero_()
    memory.meet(others)  # all buffers have been read and may be written again
