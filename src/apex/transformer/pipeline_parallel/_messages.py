"""Asynchronous messages between pipeline stages, on any backend.

Messages posted one after the other are started as one batch. On NCCL all messages of a group use one communicator, and
both ends post them in the same order. On Gloo each message has a tag, and device tensors are copied through host
memory.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..._failures import explained
from ...ops._host import HOST, on_host
from .._groups.device import parameter_device

# Maximum number of pending sends. Gloo does not report completed sends, so the oldest is waited for.
MAX_PENDING_SENDS = 8

_NAMES = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128"
DTYPES = tuple(getattr(torch, name) for name in _NAMES.split())
MAX_TENSORS, MAX_DIMENSIONS = 4, 8


class TensorSpec(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


def spec_of(tensor: Tensor) -> TensorSpec:
    """Return a tensor's shape and dtype."""
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


class Transfer:
    """A tensor that is being sent or received."""

    def __init__(
        self, link: Link, operation: Any, tensor: Tensor, buffer: Tensor, peer: int, tag: int, description: str
    ) -> None:
        # The backend reads or writes `buffer`: the tensor itself, or its copy in host memory.
        self.tensor, self.buffer, self.description = tensor, buffer, description
        self.operation = dist.P2POp(operation, buffer, peer, link.group, tag)
        self.work: Any = None
        self._link = link

    def done(self) -> bool:
        """Return True if the backend reports that the transfer is complete."""
        return self.work is not None and self.work.is_completed()

    def wait(self) -> Tensor:
        """Wait for the transfer and return the tensor; on a device only the current stream waits."""
        if self.work is None:
            self._link.flush()
        with explained(self.description):
            self.work.wait()
        if self.buffer is not self.tensor and self.operation.op is dist.irecv:
            self.tensor.detach().copy_(self.buffer)
        return self.tensor


class Link:
    """The messages between this process and the others of a group."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.backend = dist.get_backend(group)
        self._posted: list[Transfer] = []
        self._sends: deque[Transfer] = deque()

    def _sends_directly(self, tensor: Tensor) -> bool:
        """Return True if the backend can read the tensor on its device."""
        return on_host(tensor) or self.backend != dist.Backend.GLOO

    def send(self, tensor: Tensor, peer: int, tag: int, description: str) -> Transfer:
        """Post a send to the global rank `peer`; the tensor stays alive until it is sent."""
        tensor = tensor.detach().contiguous()
        buffer = tensor if self._sends_directly(tensor) else tensor.to(HOST)
        transfer = Transfer(self, dist.isend, tensor, buffer, peer, tag, description)
        self._posted.append(transfer)
        self._sends.append(transfer)
        return transfer

    def receive(self, spec: TensorSpec, device: torch.device, peer: int, tag: int, description: str) -> Transfer:
        """Post a receive from the global rank `peer`."""
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        buffer = tensor if self._sends_directly(tensor) else torch.empty_like(tensor, device=HOST)
        transfer = Transfer(self, dist.irecv, tensor, buffer, peer, tag, description)
        self._posted.append(transfer)
        return transfer

    def flush(self) -> None:
        """Start all posted messages."""
        posted, self._posted = self._posted, []
        if posted:
            with explained(posted[0].description):
                works = dist.batch_isend_irecv([transfer.operation for transfer in posted])
            # NCCL returns one work object for the whole batch.
            for transfer, work in zip(posted, works if len(works) == len(posted) else works * len(posted), strict=True):
                transfer.work = work
        while self._sends and (self._sends[0].done() or len(self._sends) > MAX_PENDING_SENDS):
            self._sends.popleft().wait()

    def finish(self) -> None:
        """Start all posted messages, and wait until all sends are complete."""
        self.flush()
        while self._sends:
            self._sends.popleft().wait()

    def announce(
        self, specs: Sequence[TensorSpec], device: torch.device, peer: int, tag: int, description: str
    ) -> Transfer:
        """Send the shapes and dtypes of the tensors that follow, as a message of fixed size."""
        if len(specs) > MAX_TENSORS or any(len(spec.shape) > MAX_DIMENSIONS for spec in specs):
            raise ValueError(
                f"{description}: at most {MAX_TENSORS} tensors of {MAX_DIMENSIONS} dimensions can be sent at once, got "
                f"{', '.join(map(str, specs))}"
            )
        numbers = [len(specs)]
        for spec in specs:
            dimensions = [*spec.shape, *[0] * (MAX_DIMENSIONS - len(spec.shape))]
            numbers += [DTYPES.index(spec.dtype), len(spec.shape), *dimensions]
        numbers += [0] * (_ANNOUNCEMENT_LENGTH - len(numbers))
        return self.send(
            torch.tensor(numbers, dtype=torch.int64, device=self._announcement_device(device)), peer, tag, description
        )

    def receive_announcement(self, device: torch.device, peer: int, tag: int, description: str) -> Transfer:
        """Post a receive of an announcement; `read_announcement` decodes it."""
        return self.receive(
            TensorSpec((_ANNOUNCEMENT_LENGTH,), torch.int64), self._announcement_device(device), peer, tag, description
        )

    def _announcement_device(self, device: torch.device) -> torch.device:
        return HOST if self.backend == dist.Backend.GLOO else device

    def break_off(self) -> None:
        """Make every process that waits for this one fail at once instead of at its timeout.

        Gloo closes all of a process's connections in a group when one wait times out, so this method provokes a
        timeout.
        """
        self._posted, self._sends = [], deque()
        if dist.get_world_size(self.group) == 1:
            return
        if self.backend != dist.Backend.GLOO:
            with contextlib.suppress(Exception):
                self.group._get_backend(parameter_device()).abort()
            return
        for peer in dist.get_process_group_ranks(self.group):
            if peer != dist.get_rank():
                with contextlib.suppress(RuntimeError):
                    buffer = torch.empty(1, dtype=torch.uint8, device=HOST)
                    work = dist.irecv(buffer, peer, group=self.group, tag=_NEVER_SENT)
                    assert work is not None
                    work.wait(timedelta(milliseconds=1))


_ANNOUNCEMENT_LENGTH = 1 + MAX_TENSORS * (2 + MAX_DIMENSIONS)
_NEVER_SENT = 2**30


def read_announcement(transfer: Transfer) -> list[TensorSpec]:
    """Wait for an announcement and return the shapes and dtypes of the tensors that follow."""
    count, *numbers = transfer.wait().tolist()
    length = 2 + MAX_DIMENSIONS
    specs = [numbers[index * length : (index + 1) * length] for index in range(count)]
    return [TensorSpec(tuple(shape[:dimensions]), DTYPES[code]) for code, dimensions, *shape in specs]
