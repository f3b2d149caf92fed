"""Memory of a rank that the other ranks of its machine read and write as tensors of their own.

PyTorch's symmetric memory on GPUs (where it cannot be shared `problem` says why), files in memory on the host.
"""

from __future__ import annotations

import ast
import logging
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._failures import explained
from ..ops._host import HOST
from .neighbours import group_of

logger = logging.getLogger("apex.peer_memory")

_MEMORY_FOLDER = Path("/dev/shm")  # where a file stays in memory, on Linux
ADDRESS_BYTES = 1024  # of the description of a piece of memory that another process opens


class PeerMemory:
    """`size` bytes of every rank, zero at first; all ranks must make it."""

    def __init__(self, size: int, ranks: Sequence[int]) -> None:
        self.ranks, self.size = list(ranks), size
        self.group = group_of(ranks)
        self.index = 0 if self.group is None else self.ranks.index(dist.get_rank())
        self.problem: str | None = None
        self._handle: Any = None
        on_host = self.group is not None and dist.get_backend(self.group) == dist.Backend.GLOO
        device = HOST if on_host else default_device()
        if self.group is None:
            self.memories = [torch.zeros(size, dtype=torch.uint8, device=device)]
        elif device == HOST:
            self.memories = self._map_files()
        else:
            self.memories = self._rendezvous(device)

    def _all(self, value: Any) -> list[Any]:
        """The values that all ranks give, by rank."""
        values: list[Any] = [None] * len(self.ranks)
        with explained("setting up memory that ranks share"):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def _check_machine(self, machines: Sequence[str]) -> None:
        if len(set(machines)) > 1:
            raise RuntimeError(f"ranks {self.ranks} must be on one machine, but are on {', '.join(machines)}")

    def _map_files(self) -> list[Tensor]:
        path = new_file(self.size)
        try:
            found = self._all((socket.gethostname(), path))
            self._check_machine([machine for machine, _ in found])
            memories = [map_file(each, self.size) for _, each in found]
            self._all(None)  # all have mapped it
        finally:
            Path(path).unlink()
        return memories

    def _rendezvous(self, device: torch.device) -> list[Tensor]:
        self._check_machine(self._all(socket.gethostname()))
        memories: list[Tensor] = []
        problem = None
        try:
            from torch.distributed import _symmetric_memory

            self._own = _symmetric_memory.empty(self.size, dtype=torch.uint8, device=device).zero_()
            self._handle = _symmetric_memory.rendezvous(self._own, self.group)
            places = range(len(self.ranks))
            memories = [self._handle.get_buffer(place, (self.size,), torch.uint8) for place in places]
        except (ImportError, RuntimeError, TypeError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
        problems = [each for each in self._all(problem) if each is not None]
        if not problems:
            return memories
        self.problem = f"ranks {self.ranks} cannot share memory of {device}: {problems[0]}"
        logger.warning("%s; halos go by messages", self.problem)
        return []

    def bytes_of(self, offset: int, count: int) -> list[Tensor]:
        """The same piece of every rank's memory."""
        if self.problem is not None:
            raise RuntimeError(self.problem)
        return [memory[offset : offset + count] for memory in self.memories]

    def meet(self, others: Sequence[int]) -> None:
        """Waits, on a GPU its queue, until the ranks at these places have come here too: then all was written."""
        others = list(dict.fromkeys(others))  # in a ring of two, one rank is on both sides
        if self._handle is not None:
            for other in others:
                self._handle.put_signal(other)
            for other in others:
                self._handle.wait_signal(other)
            return
        # Messages order writes to memory as well.
        tokens = [torch.zeros(1, dtype=torch.uint8, device=HOST) for _ in range(2 * len(others))]
        kinds = [dist.isend, dist.irecv] * len(others)
        ranks = [self.ranks[other] for other in others for _ in range(2)]
        operations = [dist.P2POp(*each, self.group) for each in zip(kinds, tokens, ranks, strict=True)]
        with explained(f"waiting for ranks {', '.join(map(str, ranks[::2]))} at memory that is shared"):
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()


def default_device() -> torch.device:
    """The accelerator in use, else the host."""
    return torch.accelerator.current_stream().device if torch.accelerator.is_available() else HOST


def new_file(size: int) -> str:
    """The path of a new file of zeros, in memory where that has room for it."""
    # Reserved, because a process that writes to a sparse file ends where no room is left.
    reserve = getattr(os, "posix_fallocate", lambda descriptor, start, count: os.ftruncate(descriptor, count))
    for folder in (_MEMORY_FOLDER, None):
        try:
            descriptor, path = tempfile.mkstemp(prefix="apex-peer-", dir=folder)
        except FileNotFoundError:
            continue
        try:
            reserve(descriptor, 0, size)
            return path
        except OSError:
            Path(path).unlink()
            if folder is None:
                raise
        finally:
            os.close(descriptor)
    raise FileNotFoundError(f"there is no folder for a file of {size} bytes")


def map_file(path: str, size: int) -> Tensor:
    """The bytes of a file, shared with every process that maps it."""
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8, device=HOST)


def address_of(memory: Tensor, path: str | None) -> Tensor:
    """How another process opens this memory: bytes of a fixed number, to be gathered from all."""
    way = (path, memory.numel()) if path is not None else memory.untyped_storage()._share_cuda_()
    text = repr(way).encode()
    if len(text) > ADDRESS_BYTES:
        raise RuntimeError(f"the address takes {len(text)} bytes, more than {ADDRESS_BYTES}")
    return torch.frombuffer(bytearray(text.ljust(ADDRESS_BYTES)), dtype=torch.uint8)


def open_address(address: Tensor) -> Tensor:
    """The memory of another process, for an address that it made."""
    way = ast.literal_eval(bytes(address.tolist()).decode().strip())
    if len(way) == 2:
        return map_file(*way)
    storage = torch.UntypedStorage._new_shared_cuda(*way)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
