"""GDSFile: copies a tensor's bytes between a file and a device, bypassing host memory if cuFile is available."""

from __future__ import annotations

import contextlib
import ctypes
import functools
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
_BUFFER = 64 << 20  # bytes of the pinned buffer through which device tensors are copied without cuFile


class GDSFile(contextlib.AbstractContextManager):
    """A file that stores the raw bytes of one whole tensor from its beginning; a context manager.

    Modes "r" and "w" use cuFile for tensors on a GPU, "rn" and "wn" never do. If cuFile cannot be used, `reason` says
    why and the data passes through a pinned buffer. Opening for writing truncates the file. Loading from a file that is
    too short raises EOFError.
    """

    def __init__(self, filename: str, mode: str) -> None:
        if mode not in _MODES:
            raise ValueError(f"mode={mode!r}: one of {', '.join(_MODES)} is needed")
        self.filename, self.mode = os.fspath(filename), mode
        self.reason: str | None = None if mode in ("r", "w") else f"mode {mode!r}"
        self._direct: Any = None
        flags = os.O_RDONLY if mode.startswith("r") else os.O_RDWR | os.O_CREAT | os.O_TRUNC
        self._descriptor: int | None = os.open(self.filename, flags, 0o666)

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._direct = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def load_data(self, tensor: Tensor, direct: bool = True) -> None:
        """Fill a tensor from the file; unless `direct`, the data passes through host memory."""
        descriptor, size = self._open("r"), tensor.numel() * tensor.element_size()
        available = os.fstat(descriptor).st_size
        if available < size:
            raise EOFError(f"{self.filename} has {available} bytes, the tensor {list(tensor.shape)} needs {size}")
        values = tensor.detach()
        whole = values if _is_whole(values) else torch.empty_like(values, memory_format=torch.contiguous_format)
        if not (direct and self._by_cufile(whole, "load_storage")):
            self._by_host(whole, os.readv)
        if whole is not values:
            values.copy_(whole)

    def save_data(self, tensor: Tensor, direct: bool = True) -> None:
        """Write a tensor to the file; unless `direct`, the data passes through host memory."""
        descriptor, values = self._open("w"), tensor.detach()
        whole = values if _is_whole(values) else values.clone(memory_format=torch.contiguous_format)
        if not (direct and self._by_cufile(whole, "save_storage")):
            self._by_host(whole, os.writev)
        os.ftruncate(descriptor, whole.numel() * whole.element_size())

    load_data_no_gds = functools.partialmethod(load_data, direct=False)
    save_data_no_gds = functools.partialmethod(save_data, direct=False)

    def _open(self, kind: str) -> int:
        if self._descriptor is None:
            raise ValueError(f"{self.filename} is closed")
        if not self.mode.startswith(kind):
            verb = "read from" if kind == "r" else "written to"
            raise ValueError(f"{self.filename} was opened with mode={self.mode!r} and cannot be {verb}")
        return self._descriptor

    def _by_cufile(self, whole: Tensor, call: str) -> bool:
        """Move the tensor's storage by cuFile and return True; return False if cuFile cannot be used."""
        if on_host(whole) or self.reason is not None or not whole.numel():
            return False
        try:
            if self._direct is None:
                self._direct = torch.cuda.gds.GdsFile(self.filename, os.O_RDONLY if self.mode == "r" else os.O_RDWR)
            torch.accelerator.current_stream(whole.device).synchronize()
            getattr(self._direct, call)(whole.untyped_storage())
        except (AttributeError, OSError, RuntimeError) as error:
            self.reason, self._direct = f"{type(error).__name__}: {error}", None
            logger.warning("cuFile cannot use %s, a pinned buffer does it: %s", self.filename, self.reason)
            return False
        return True

    def _by_host(self, whole: Tensor, call: Callable[..., int]) -> None:
        """Read (`os.readv`) or write (`os.writev`) a tensor's bytes; a device's pass through a pinned buffer."""
        assert self._descriptor is not None
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        values = whole.reshape(-1).view(torch.uint8)
        length, through = max(1, min(_BUFFER, values.numel())), not on_host(values)
        buffer = torch.empty(length if through else 0, dtype=torch.uint8, device=HOST, pin_memory=through)
        for piece in values.split(length):
            part = buffer[: piece.numel()] if through else piece
            if call is os.writev and through:
                part.copy_(piece)
            done, view = 0, (ctypes.c_char * part.numel()).from_address(part.data_ptr())
            while done < part.numel():  # one call may transfer only a part
                count = call(self._descriptor, [memoryview(view)[done:]])
                if not count:
                    raise EOFError(f"{self.filename} ended {part.numel() - done} bytes before the tensor was full")
                done += count
            if call is os.readv and through:
                piece.copy_(part)


def _is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor is contiguous and covers its whole storage."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
