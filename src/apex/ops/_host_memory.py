"""Host memory for large state of optimizers: kernels of a GPU read and write it over the bus, without copies.

A tensor of `HostMemory` counts as a tensor of its device: kernels, PyTorch's operators, CUDA graphs and checkpoints
take it as they take any other. Only its elements lie in pinned host memory, so that every pass over it takes the time
of the bus.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ._host import HOST

# Bytes between the starts of two tensors: a multiple of what a warp reads at once.
_ALIGNMENT = 512
# Bytes of the first and of the largest block. PyTorch rounds pinned blocks up to powers of two.
_FIRST_BLOCK, _LARGEST_BLOCK = 1 << 22, 1 << 30


class _Block:
    """Pinned host memory that tensors are cut from."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with torch.cuda.device(device):  # the device whose kernels may use the memory
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=HOST, pin_memory=True)
        self.used = 0
        # PyTorch may give freed memory to others at once, so kernels that still write to it must end first.
        weakref.finalize(self, _wait, device)

    def take(self, nbytes: int) -> Tensor | None:
        """Return the next bytes of the block, or None if there are too few."""
        start = self.used
        if start + nbytes > self.memory.numel():
            return None
        self.used = start + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return self.memory[start : start + nbytes]


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a new tensor like this one, which has no gaps in its memory."""
    return torch.empty_like(tensor, device=torch.device("meta")).stride()


def _wait(device: torch.device) -> None:
    with contextlib.suppress(RuntimeError, AssertionError):  # at the end of a process there may be no device any more
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(device)


class _Part:
    """A range of pinned host memory that PyTorch can view as a CUDA tensor; keeps its block alive."""

    def __init__(self, block: _Block, part: Tensor) -> None:
        self._block = block
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (part.numel(),),
            "strides": None,
            "typestr": "|u1",
            "data": (part.data_ptr(), False),
            "version": 3,
        }


class HostMemory:
    """Host memory for tensors of one device, allocated in large pinned blocks; ordinary memory on a CPU.

    Each tensor has a storage of its own, so that a checkpoint of it has no more than its elements. A block is freed
    with the last of its tensors.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"host memory is available to CUDA and ROCm GPUs and to the CPU, not to {device}")
        self.device = device
        self._block: _Block | None = None
        self._next_size = _FIRST_BLOCK
        # The bytes of each tensor.
        self._tensors: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._streams: tuple[Any, Any] | None = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous, uninitialised tensor of the device whose elements lie in host memory."""
        shape = tuple(shape)
        if self.device.type == "cpu" or 0 in shape:
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            return self._known(tensor, tensor.view(-1).view(torch.uint8))
        block, part = self._take(math.prod(shape) * dtype.itemsize)
        visible = torch.as_tensor(_Part(block, part), dtype=torch.uint8, device=self.device)
        return self._known(visible.view(dtype).view(shape), part)

    def moved(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in host memory, laid out alike, or the tensor itself if it lies there."""
        if tensor in self._tensors:
            return tensor
        flat = self.empty((tensor.numel(),), tensor.dtype)
        copy = flat.as_strided(tensor.shape, _dense_strides(tensor))
        return self._known(copy.copy_(tensor), self._tensors[flat])

    def bytes_of(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor's bytes as a CPU tensor, [bytes], for copies; None if it does not lie in this memory."""
        return self._tensors.get(tensor)

    def streams(self) -> tuple[Any, Any]:
        """Return the streams for copies to the device and back, always the same ones; None on a CPU."""
        if self._streams is None:
            streams = [torch.cuda.Stream(self.device) for _ in range(2)] if self.device.type == "cuda" else [None, None]
            self._streams = streams[0], streams[1]
        return self._streams

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialised CPU tensor like another tensor, in pinned memory if the device is a GPU."""
        if self.device.type == "cpu" or not tensor.numel():
            return torch.empty_like(tensor, device=HOST)
        _, part = self._take(tensor.numel() * tensor.element_size())
        return part.view(tensor.dtype).as_strided(tensor.shape, _dense_strides(tensor))

    def wait(self) -> None:
        """Wait for the copies that the current stream of the device has begun."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _known(self, tensor: Tensor, part: Tensor) -> Tensor:
        self._tensors[tensor] = part
        return tensor

    def _take(self, nbytes: int) -> tuple[_Block, Tensor]:
        part = None if self._block is None else self._block.take(nbytes)
        if part is not None:
            assert self._block is not None
            return self._block, part
        block = _Block(max(nbytes, self._next_size), self.device)
        part = block.take(nbytes)
        assert part is not None
        if nbytes <= self._next_size:  # larger tensors have blocks of their own
            self._block, self._next_size = block, min(2 * self._next_size, _LARGEST_BLOCK)
        return block, part
