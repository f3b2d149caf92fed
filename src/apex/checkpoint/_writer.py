"""The background process that writes checkpoints, and the messages between it and the training.

A request names a function and has its arguments, pickled, with tensors in memory that both processes map. The answer is
None, or an error's number and text. The writers of all ranks form a Gloo group of their own. A writer ends when the
training process closes its end of the connection or is killed, after the request that it works on.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops._staging import ALIGNMENT, SMALL_BYTES, part_of

# The length of a message in bytes, and the size of the memory whose descriptor comes with it, or 0.
_HEADER = struct.Struct("!QQ")
_MAX_DESCRIPTORS = 4
_PAGE_BYTES = 4 << 20  # at least SMALL_BYTES
_WATCH_SECONDS = 0.5


@dataclass(frozen=True)
class Meeting:
    """The group of the writers: its size, this writer's rank, and the store of rank 0's writer.

    Rank 0 gets the descriptor of the store's listening socket, so that no other program can take the port.
    """

    rank: int
    ranks: int
    host: str
    port: int
    listener: int | None
    timeout: timedelta | None
    # The training process that this writer works for.
    parent: int

    def join(self) -> None:
        """Connect to the writers of the other ranks."""
        timeout = self.timeout or timedelta(minutes=30)
        with _ending_with(self.parent):
            store = dist.TCPStore(
                self.host,
                self.port,
                self.ranks,
                is_master=self.listener is not None,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=self.listener,
                use_libuv=False,  # libuv's server in PyTorch 2.6 does not answer on a socket that it was given
            )
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.ranks, timeout=timeout)


@contextlib.contextmanager
def _ending_with(parent: int) -> Iterator[None]:
    """End this process if its parent has ended or ends in the block, which waits for writers of other processes."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_WATCH_SECONDS):
            if os.getppid() != parent:
                os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


class Pickler(pickle.Pickler):
    """A pickler that leaves out tensors: `tensors` lists them with their offsets in a buffer of `size` bytes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[Tensor, int]] = []
        self.size = 0
        self._offsets: dict[int, int] = {}
        self._page = range(0)  # free bytes of the last page of small tensors

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        if value.layout != torch.strided or value.is_meta:
            raise TypeError(f"an asynchronous save needs dense tensors, not one of layout {value.layout}")
        offset = self._offsets.get(id(value))
        if offset is None:
            offset = self._offsets[id(value)] = self._place(value.nbytes)
            self.tensors.append((value.detach(), offset))
        return offset, value.dtype, tuple(value.shape)

    def _place(self, count: int) -> int:
        """Return the offset of `count` new bytes; small tensors lie together in pages, and are copied together."""
        space = -(-count // ALIGNMENT) * ALIGNMENT
        if count >= SMALL_BYTES:
            self.size += space
            return self.size - space
        if self._page.stop - self._page.start < space:
            self._page = range(self.size, self.size + _PAGE_BYTES)
            self.size += _PAGE_BYTES
        self._page = range(self._page.start + space, self._page.stop)
        return self._page.start - space


class Unpickler(pickle.Unpickler):
    """The counterpart of `Pickler`: tensors are parts of mapped memory."""

    def __init__(self, file: io.BytesIO, memory: Any) -> None:
        super().__init__(file)
        self._memory = memory

    def persistent_load(self, identity: Any) -> Tensor:
        return part_of(self._memory, *identity)


def send(channel: socket.socket, message: bytes, memory: tuple[int, int] | None = None) -> None:
    """Send a message, with the descriptor and the size of shared memory if there is a new one."""
    descriptor, size = memory or (None, 0)
    socket.send_fds(channel, [_HEADER.pack(len(message), size)], [] if descriptor is None else [descriptor])
    channel.sendall(message)


def receive(channel: socket.socket) -> tuple[bytes, tuple[int, int] | None] | None:
    """Return a message and the memory that came with it, or None if the other process is gone."""
    try:
        header, descriptors, _, _ = socket.recv_fds(channel, _HEADER.size, _MAX_DESCRIPTORS)
    except ConnectionError:  # it was killed before it read an answer
        return None
    header += _read(channel, _HEADER.size - len(header)) if header else b""
    if len(header) < _HEADER.size:
        return None
    length, size = _HEADER.unpack(header)
    message = _read(channel, length)
    return None if len(message) < length else (message, (descriptors[0], size) if descriptors else None)


def _read(channel: socket.socket, count: int) -> bytes:
    """Return `count` bytes, or fewer if the other process is gone."""
    parts = bytearray()
    while len(parts) < count:
        part = channel.recv(min(count - len(parts), 1 << 20))
        if not part:
            break
        parts += part
    return bytes(parts)


def serve(descriptor: int, meeting: Meeting | None, module: str) -> None:
    """Answer requests until the other end of the connection is closed; import `module` before the first one."""
    if sys.platform != "win32":
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal
    torch.set_num_threads(1)
    importlib.import_module(module)
    channel = socket.socket(fileno=descriptor)
    memory: mmap.mmap | None = None
    while (received := receive(channel)) is not None:
        message, new = received
        if new is not None:
            memory = mmap.mmap(*new)
            os.close(new[0])
        answer = None
        try:
            together, module, name, arguments, data = pickle.loads(message)
            if together and meeting is not None and not dist.is_initialized():
                meeting.join()
            function = getattr(importlib.import_module(module), name)
            function(*arguments, Unpickler(io.BytesIO(data), memory).load())
        except BaseException as error:
            answer = getattr(error, "errno", None), text_of(error)
        try:
            send(channel, pickle.dumps(answer))
        except OSError:  # the training process was killed meanwhile
            break


def text_of(error: BaseException | None) -> str:
    """Return the message of an error without the number of the system's error, which `OSError` adds again."""
    return getattr(error, "strerror", None) or str(error)
