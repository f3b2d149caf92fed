"""Memory that the ranks of one machine share: each rank reads and writes the others' memory as tensors.

On GPUs it is PyTorch's symmetric memory; if that is not available, `problem` says why. On the host it is memory-mapped
files.
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
from .collectives import gather_objects
from .neighbours import group_of

logger = logging.getLogger("apex.peer_memory")

_MEMORY_FOLDER = Path("/dev/shm")  # files here stay in memory, on Linux
ADDRESS_BYTES = 1024  # fixed length of the description that `open_address` reads


class PeerMemory:
    """A buffer of `size` bytes on every rank, zero at first; all ranks must create it together."""

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
        """Return the values that all ranks passed, by rank."""
        return gather_objects(value, "setting up memory that ranks share", self.group)

    def _check_machine(self, machines: Sequence[str]) -> None:
        if len(set(machines)) > 1:
            raise RuntimeError(f"ranks {self.ranks} must be on one machine, but are on {', '.join(machines)}")

    def _map_files(self) -> list[Tensor]:
        path = new_file(self.size)
        try:
            files = self._all((socket.gethostname(), path))
            self._check_machine([machine for machine, _ in files])
            memories = [map_file(file, self.size) for _, file in files]
            self._all(None)  # wait until all have mapped it
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
            indices = range(len(self.ranks))
            memories = [self._handle.get_buffer(index, (self.size,), torch.uint8) for index in indices]
        except (ImportError, RuntimeError, TypeError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
        problems = [reason for reason in self._all(problem) if reason is not None]
        if not problems:
            return memories
        self.problem = f"ranks {self.ranks} cannot share memory of {device}: {problems[0]}"
        logger.warning("%s; halos go by messages", self.problem)
        return []

    def bytes_of(self, offset: int, count: int) -> list[Tensor]:
        """Return the bytes `offset` to `offset + count` of every rank's memory."""
        if self.problem is not None:
            raise RuntimeError(self.problem)
        return [memory[offset : offset + count] for memory in self.memories]

    def meet(self, others: Sequence[int]) -> None:
        """Wait until the ranks with these indices have called `meet` too, so that all their writes are visible.

        On a GPU only the stream waits.
        """
        others = list(dict.fromkeys(others))  # in a ring of two, the same rank is on both sides
        if self._handle is not None:
            for other in others:
                self._handle.put_signal(other)
            for other in others:
                self._handle.wait_signal(other)
            return
        # Messages also order writes to memory.
        tokens = [torch.zeros(1, dtype=torch.uint8, device=HOST) for _ in range(2 * len(others))]
        kinds = [dist.isend, dist.irecv] * len(others)
        ranks = [self.ranks[other] for other in others for _ in range(2)]
        operations = [dist.P2POp(*operation, self.group) for operation in zip(kinds, tokens, ranks, strict=True)]
        with explained(f"waiting for ranks {', '.join(map(str, ranks[::2]))} at memory that is shared"):
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()


def default_device() -> torch.device:
    """Return the accelerator in use, or the host."""
    return torch.accelerator.current_stream().device if torch.accelerator.is_available() else HOST


def new_file(size: int) -> str:
    """Return the path of a new file of zeros, in memory if there is room for it."""
    # Space is reserved, because a process that writes to a sparse file is killed when the disk is full.
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
    """Return the bytes of a file, shared with every process that maps it."""
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8, device=HOST)


def address_of(memory: Tensor, path: str | None) -> Tensor:
    """Return a description of fixed length that lets another process open this memory."""
    description = (path, memory.numel()) if path is not None else memory.untyped_storage()._share_cuda_()
    text = repr(description).encode()
    if len(text) > ADDRESS_BYTES:
        raise RuntimeError(f"the address takes {len(text)} bytes, more than {ADDRESS_BYTES}")
    return torch.frombuffer(bytearray(text.ljust(ADDRESS_BYTES)), dtype=torch.uint8)


def open_address(address: Tensor) -> Tensor:
    """Open the memory of another process from the description that `address_of` made there."""
    description = ast.literal_eval(bytes(address.tolist()).decode().strip())
    if len(description) == 2:
        return map_file(*description)
    storage = torch.UntypedStorage._new_shared_cuda(*description)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
