"""Memory that is allocated once and reused for tensors."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ..._arguments import Count, Index, checked
from .._groups.device import parameter_device

_buffers: dict[str, MemoryBuffer] = {}


@checked
def allocate_mem_buff(name: str, numel: Index, dtype: torch.dtype, track_usage: bool) -> MemoryBuffer:
    """Allocate a buffer of `numel` elements under a new name."""
    assert name not in _buffers, f"name: memory buffer {name} already allocated."
    _buffers[name] = MemoryBuffer(name, numel, dtype, track_usage)
    return _buffers[name]


@checked
def get_mem_buff(name: str) -> MemoryBuffer:
    """Return the buffer with this name."""
    if name not in _buffers:
        raise KeyError(f"name={name!r}: no memory buffer is called so; there are {', '.join(_buffers) or 'none'}")
    return _buffers[name]


class MemoryBuffer:
    """A flat buffer that hands out tensors from its start until `reset`."""

    @checked
    def __init__(self, name: str, numel: Index, dtype: torch.dtype, track_usage: bool) -> None:
        self.name = name
        self.numel = numel
        self.dtype = dtype
        self.data = torch.empty(numel, dtype=dtype, device=parameter_device())
        self._start = 0
        self.track_usage = track_usage
        # Sums over all resets of used and of available elements; their quotient is the average usage.
        self.in_use_value = 0.0
        self.total_value = 0.0

    def reset(self) -> None:
        """Mark all memory as free."""
        if self.track_usage:
            self.in_use_value += float(self._start)
            self.total_value += float(self.numel)
        self._start = 0

    def is_in_use(self) -> bool:
        """Return True if any memory is in use."""
        return self._start > 0

    def numel_in_use(self) -> int:
        """Return the number of elements in use."""
        return self._start

    @checked
    def add(self, tensor: Tensor) -> Tensor:
        """Return a copy of `tensor`, without its gradients, in this buffer."""
        assert tensor.dtype == self.dtype, f"memory buffer {self.name} has {self.dtype}, the tensor {tensor.dtype}"
        count, left = tensor.numel(), self.numel - self._start
        assert count <= left, f"memory buffer {self.name} has {left} elements left, not {count}"
        end = self._start + count
        copy = self.data[self._start : end].view(tensor.shape)
        copy.copy_(tensor.detach())  # the buffer, and all later copies, would belong to its autograd graph
        self._start = end
        return copy

    def get_data(self) -> Tensor:
        """Return the used part of the buffer as a 1-D view."""
        return self.data[: self._start]

    def print_average_usage(self) -> None:
        """Log the average usage of the buffer in percent."""
        assert self.track_usage, "You need to enable track usage."
        percent = 100.0 * self.in_use_value / self.total_value if self.total_value else 0.0
        logging.getLogger(__name__).info("usage of %s memory buffer: %.2f %%", self.name, percent)


class RingMemBuffer:
    """Several buffers that are used in turn."""

    @checked
    def __init__(self, name: str, num_buffers: Count, numel: Index, dtype: torch.dtype, track_usage: bool) -> None:
        self.num_buffers = num_buffers
        names = [f"{name} {i}" for i in range(num_buffers)]
        for each in names:  # check all names before the first allocation
            assert each not in _buffers, f"name: memory buffer {each} already allocated."
        self.buffers = [allocate_mem_buff(each, numel, dtype, track_usage) for each in names]
        self._index = -1

    def get_next_buffer(self) -> MemoryBuffer:
        """Return the next buffer, which must not be in use."""
        following = (self._index + 1) % self.num_buffers
        buffer = self.buffers[following]
        assert not buffer.is_in_use(), "buffer is already in use."
        self._index = following
        return buffer
