"""GDSFile: a tensor's bytes between a file and a device, past the host's memory where cuFile can do that."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops._host import HOST, on_host

__all__ = ["GDSFile"]

logger = logging.getLogger("apex.gpu_direct_storage")

_MODES = ("r", "w", "rn", "wn")
# Bytes of the pinned buffer through which tensors of a device go without cuFile.
_BUFFER = 64 << 20


class GDSFile:
    """A file for raw bytes of whole tensors, from its beginning; a context manager.

    Modes "r" and "w" use cuFile for tensors on a GPU, "rn" and "wn" never. Where cuFile is not to be had, `reason` says
    why, and a pinned buffer takes its place. Writing begins with an empty file; a file that is too short raises.
    """

    def __init__(self, filename: str, mode: str) -> None:
        if mode not in _MODES:
            raise ValueError(f"mode={mode!r}: one of {', '.join(_MODES)} is needed")
        self.filename, self.mode = os.fspath(filename), mode
        self.reason: str | None = None if mode in ("r", "w") else f"mode {mode!r}"
        self._direct: Any = None
        flags = os.O_RDONLY if mode.startswith("r") else os.O_RDWR | os.O_CREAT | os.O_TRUNC
        self._descriptor: int | None = os.open(self.filename, flags, 0o666)

    def __enter__(self) -> GDSFile:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the use of the file; may be called twice."""
        self._direct = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def load_data(self, tensor: Tensor) -> None:
        """Fills a tensor from the file."""
        self._load(tensor, direct=True)

    def save_data(self, tensor: Tensor) -> None:
        """Writes a tensor to the file."""
        self._save(tensor, direct=True)

    def load_data_no_gds(self, tensor: Tensor) -> None:
        """The same through the host's memory."""
        self._load(tensor, direct=False)

    def save_data_no_gds(self, tensor: Tensor) -> None:
        """The same through the host's memory."""
        self._save(tensor, direct=False)

    def _load(self, tensor: Tensor, direct: bool) -> None:
        descriptor, size = self._open("r"), tensor.numel() * tensor.element_size()
        found = os.fstat(descriptor).st_size
        if found < size:
            raise EOFError(f"{self.filename} has {found} bytes, the tensor {list(tensor.shape)} needs {size}")
        values = tensor.detach()
        whole = values if _is_whole(values) else torch.empty_like(values, memory_format=torch.contiguous_format)
        if not (direct and self._by_cufile(whole, "load_storage")):
            os.lseek(descriptor, 0, os.SEEK_SET)
            _through_host(whole, lambda buffer: _complete(os.readv, descriptor, buffer, self.filename), fill=True)
        if whole is not values:
            values.copy_(whole)

    def _save(self, tensor: Tensor, direct: bool) -> None:
        descriptor = self._open("w")
        values = tensor.detach()
        whole = values if _is_whole(values) else values.clone(memory_format=torch.contiguous_format)
        if not (direct and self._by_cufile(whole, "save_storage")):
            os.lseek(descriptor, 0, os.SEEK_SET)
            _through_host(whole, lambda buffer: _complete(os.writev, descriptor, buffer, self.filename), fill=False)
        os.ftruncate(descriptor, whole.numel() * whole.element_size())

    def _open(self, kind: str) -> int:
        if self._descriptor is None:
            raise ValueError(f"{self.filename} is closed")
        if not self.mode.startswith(kind):
            verb = "read from" if kind == "r" else "written to"
            raise ValueError(f"{self.filename} was opened with mode={self.mode!r} and cannot be {verb}")
        return self._descriptor

    def _by_cufile(self, whole: Tensor, call: str) -> bool:
        """Whether cuFile has moved the tensor's storage."""
        if on_host(whole) or self.reason is not None or not whole.numel():
            return False
        try:
            if self._direct is None:
                flags = os.O_RDONLY if self.mode == "r" else os.O_RDWR
                self._direct = torch.cuda.gds.GdsFile(self.filename, flags)
            torch.accelerator.current_stream(whole.device).synchronize()
            getattr(self._direct, call)(whole.untyped_storage())
        except (AttributeError, OSError, RuntimeError) as error:
            self.reason, self._direct = f"{type(error).__name__}: {error}", None
            logger.warning("cuFile cannot use %s, a pinned buffer does it: %s", self.filename, self.reason)
            return False
        return True


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is all of its storage, in order."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _through_host(whole: Tensor, move: Callable[[Any], None], fill: bool) -> None:
    """Has `move` read into, or write from, the bytes of a tensor, piece by piece."""
    if not whole.numel():
        return
    values = whole.reshape(-1).view(torch.uint8)
    if on_host(values):
        move(_bytes_of(values))
        return
    buffer = torch.empty(min(_BUFFER, values.numel()), dtype=torch.uint8, device=HOST, pin_memory=True)
    for piece in values.split(buffer.numel()):
        part = buffer[: piece.numel()]
        if fill:
            move(_bytes_of(part))
            piece.copy_(part)
        else:
            part.copy_(piece)
            move(_bytes_of(part))


def _bytes_of(values: Tensor) -> memoryview:
    return memoryview((ctypes.c_char * values.numel()).from_address(values.data_ptr())).cast("B")


def _complete(call: Callable[..., int], descriptor: int, buffer: memoryview, filename: str) -> None:
    """Reads or writes all of the buffer: the system may do a part at a time."""
    done = 0
    while done < len(buffer):
        count = call(descriptor, [buffer[done:]])
        if not count:
            raise EOFError(f"{filename} ended {len(buffer) - done} bytes before the tensor was full")
        done += count
