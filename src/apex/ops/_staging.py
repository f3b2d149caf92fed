"""Copies of tensors into host memory that another process can map, made beside the training.

A copy of a device tensor runs on a side stream. An optimizer step or a captured step, which would overwrite the tensor,
waits on the device until the copy has read it: see `wait_for_copies`.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ._device import on_stream
from ._host import HOST, on_host

# Smaller device tensors are cloned at once. Running statistics of norms are among them, which forward passes change.
SMALL_BYTES = 1 << 20
# Largest piece of device memory for clones.
_PIECE_BITS = 30
# Alignment of tensors in a buffer, in bytes.
ALIGNMENT = 512

_streams: dict[torch.device, Any] = {}
# Copies that read tensors of the training and may not be done.
_reading: list[Copies] = []
_hooks: list[Any] = []


class HostBuffer:
    """Memory of the host that another process can map by its file descriptor, pinned if a device copies into it."""

    def __init__(self, size: int, pinned: bool) -> None:
        self.size, self._pinned = size, False
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("apex-checkpoint")
        else:
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        try:
            os.ftruncate(self.descriptor, size)
            if hasattr(os, "posix_fallocate"):  # a lack of memory is an OSError here, and a signal at the first write
                os.posix_fallocate(self.descriptor, 0, size)
            self.memory = mmap.mmap(self.descriptor, size)
            self.pin(pinned)
        except BaseException:
            os.close(self.descriptor)
            raise

    def pin(self, wanted: bool) -> None:
        """Lock the memory for copies of a GPU if `wanted`; other accelerators copy from pageable memory."""
        if wanted and not self._pinned and torch.cuda.is_available():
            status = torch.cuda.cudart().cudaHostRegister(self._address(), self.size, 0)
            if int(status):
                raise OSError(f"{self.size} bytes of host memory could not be pinned: CUDA error {int(status)}")
            self._pinned = True

    def close(self) -> None:
        """Free the memory; the other process may still have it mapped."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._address())
            self._pinned = False
        del self.memory
        os.close(self.descriptor)

    def _address(self) -> int:
        return torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()


def part_of(memory: mmap.mmap, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return a tensor of this dtype and shape in mapped memory; its storage has no other bytes."""
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype, device=HOST)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(torch.Size(shape))


class Copies:
    """Copies of tensors to their offsets in host memory that were started together. Host tensors are copied at once.

    With `on_device` all device tensors are cloned first, which needs memory for the clones until the copies are done;
    the training may then change the tensors at once. Otherwise optimizer steps wait for the copies.

    Clones that are neighbours in host memory are parts of one tensor and copied to the host together: CUDA queues a
    thousand operations, and a training process that queues more waits for the device. Clones are made while tensors
    that need none are copied: the optimizer waits for the copies, so their beginning must not wait for the clones.
    """

    def __init__(self, memory: mmap.mmap, tensors: Sequence[tuple[Tensor, int]], on_device: bool) -> None:
        if _is_capturing():
            raise RuntimeError("a checkpoint cannot be saved while a CUDA graph is being captured; save between steps")
        self._events: list[tuple[torch.device, Any]] = []
        self._clones: list[Tensor] = []
        # The tensors that are read while the training goes on, with their version counters.
        self._versions: list[tuple[Tensor, int]] = []
        self.changed: Tensor | None = None
        # By device: tensors that are copied without a clone, each with its offset, and groups that are cloned together.
        direct: dict[torch.device, list[tuple[Tensor, int]]] = {}
        cloned: dict[torch.device, list[list[tuple[Tensor, int]]]] = {}

        def piece(entry: tuple[Tensor, int]) -> Any:
            tensor, offset = entry
            is_cloned = not on_host(tensor) and (on_device or tensor.nbytes < SMALL_BYTES)
            return (tensor.device, offset >> _PIECE_BITS) if is_cloned else None

        ordered = sorted((entry for entry in tensors if entry[0].numel()), key=lambda entry: entry[1])
        for key, entries in itertools.groupby(ordered, piece):
            if key is not None:
                cloned.setdefault(key[0], []).append(list(entries))
                continue
            for tensor, offset in entries:
                if on_host(tensor):
                    part_of(memory, offset, tensor.dtype, tensor.shape).copy_(tensor)
                else:
                    self._versions.append((tensor, _version(tensor)))
                    direct.setdefault(tensor.device, []).append((tensor, offset))
        for device, some in direct.items():
            self._copy(memory, device, some)
        for device, pieces in cloned.items():
            self._copy(memory, device, [self._clone(entries) for entries in pieces])
        self._events = [(device, _streams[device].record_event()) for device in {*direct, *cloned}]
        if self._versions:
            _reading.append(self)
            if not _hooks:
                _hooks.append(register_optimizer_step_pre_hook(lambda *_: wait_for_copies()))

    @staticmethod
    def _copy(memory: mmap.mmap, device: torch.device, sources: list[tuple[Tensor, int]]) -> None:
        """Start copies of a device's tensors to their offsets, after the work that is queued now."""
        with on_stream(_streams.get(device) or _streams.setdefault(device, torch.Stream(device))):
            for tensor, offset in sources:
                part_of(memory, offset, tensor.dtype, tensor.shape).copy_(tensor, non_blocking=True)

    def _clone(self, entries: list[tuple[Tensor, int]]) -> tuple[Tensor, int]:
        """Return bytes on the device with clones of the tensors, as they will lie in host memory, and their offset."""
        begin, (last, end) = entries[0][1], entries[-1]
        clone = torch.empty(end + last.nbytes - begin, dtype=torch.uint8, device=last.device)
        self._clones.append(clone)
        lists: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for tensor, offset in entries:
            targets, originals = lists.setdefault(tensor.dtype, ([], []))
            part = clone.narrow(0, offset - begin, tensor.nbytes)
            targets.append(part.view(tensor.dtype).view(tensor.shape))
            originals.append(tensor)
        for targets, originals in lists.values():
            torch._foreach_copy_(targets, originals)
        return clone, begin

    def order_before_current_stream(self) -> None:
        """Make the current streams wait for the copies, and note a tensor that was already changed."""
        if self.changed is None:
            self.changed = next((tensor for tensor, version in self._versions if _version(tensor) != version), None)
        self._versions.clear()
        for device, event in self._events:
            torch.accelerator.current_stream(device).wait_event(event)

    def finish(self) -> None:
        """Wait on the host until all copies are done, and free the clones. Called by another thread, usually."""
        for _, event in self._events:
            event.synchronize()
        self._clones.clear()
        with contextlib.suppress(ValueError):
            _reading.remove(self)
        if self.changed is not None:
            shape, dtype = tuple(self.changed.shape), self.changed.dtype
            self.changed = None
            raise RuntimeError(
                f"a tensor of shape {shape} and dtype {dtype} was changed while it was copied for an asynchronous "
                'save: with staging="host" only optimizer steps may change tensors of the state; staging="device" '
                "allows everything"
            )


def wait_for_copies() -> None:
    """Make the work that is queued from now on wait, on the device, for copies that read the training's tensors.

    Called before every step of a PyTorch optimizer and before every replay of a captured step.
    """
    if _reading and not _is_capturing():
        for copies in list(_reading):
            copies.order_before_current_stream()


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
