"""Tensors sent from one pipeline stage to another, on any backend, without waiting before they are needed.

What is posted in a row is started as one batch. On NCCL all messages of a group then use one communicator, in the order
in which both ends post them. On Gloo each message has a tag, and the tensors of a device go through the host's memory.
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

# Sends that may be under way before the oldest of them is waited for: Gloo does not say when one is done.
SENDS_UNDER_WAY = 8

_NAMES = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128"
DTYPES = tuple(getattr(torch, name) for name in _NAMES.split())
MOST_TENSORS, MOST_DIMENSIONS = 4, 8


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


def spec_of(tensor: Tensor) -> TensorSpec:
    """A tensor's shape and dtype."""
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


class Transfer:
    """A tensor on its way, from here or to here."""

    def __init__(
        self, link: Link, operation: Any, tensor: Tensor, buffer: Tensor, peer: int, tag: int, what: str
    ) -> None:
        # `buffer` is what is sent or received into: the tensor itself, or its copy in the host's memory.
        self.tensor, self.buffer, self.what = tensor, buffer, what
        self.operation = dist.P2POp(operation, buffer, peer, link.group, tag)
        self.work: Any = None
        self._link = link

    def done(self) -> bool:
        """Whether waiting would take no time, as far as the backend says."""
        return self.work is not None and self.work.is_completed()

    def wait(self) -> Tensor:
        """The tensor once it is there; on a device only the current stream waits."""
        if self.work is None:
            self._link.flush()
        with explained(self.what):
            self.work.wait()
        if self.buffer is not self.tensor and self.operation.op is dist.irecv:
            self.tensor.detach().copy_(self.buffer)
        return self.tensor


class Link:
    """The messages between this process and others of a group."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.backend = dist.get_backend(group)
        self._posted: list[Transfer] = []
        self._sends: deque[Transfer] = deque()

    def _sends_directly(self, tensor: Tensor) -> bool:
        """Whether the backend takes a tensor from where it is."""
        return on_host(tensor) or self.backend != dist.Backend.GLOO

    def send(self, tensor: Tensor, peer: int, tag: int, what: str) -> Transfer:
        """Posts a tensor for the global rank `peer`; it is kept until it has been sent."""
        tensor = tensor.detach().contiguous()
        buffer = tensor if self._sends_directly(tensor) else tensor.to(HOST)
        transfer = Transfer(self, dist.isend, tensor, buffer, peer, tag, what)
        self._posted.append(transfer)
        self._sends.append(transfer)
        return transfer

    def receive(self, spec: TensorSpec, device: torch.device, peer: int, tag: int, what: str) -> Transfer:
        """Posts a place for a tensor of the global rank `peer`."""
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        buffer = tensor if self._sends_directly(tensor) else torch.empty_like(tensor, device=HOST)
        transfer = Transfer(self, dist.irecv, tensor, buffer, peer, tag, what)
        self._posted.append(transfer)
        return transfer

    def flush(self) -> None:
        """Starts what has been posted."""
        posted, self._posted = self._posted, []
        if posted:
            with explained(posted[0].what):
                works = dist.batch_isend_irecv([transfer.operation for transfer in posted])
            # NCCL has one for the whole batch.
            for transfer, work in zip(posted, works if len(works) == len(posted) else works * len(posted), strict=True):
                transfer.work = work
        while self._sends and (self._sends[0].done() or len(self._sends) > SENDS_UNDER_WAY):
            self._sends.popleft().wait()

    def finish(self) -> None:
        """Starts what has been posted, and waits for all that is being sent."""
        self.flush()
        while self._sends:
            self._sends.popleft().wait()

    # What tensors will come ------------------------------------------------------------------------------------------

    def announce(self, specs: Sequence[TensorSpec], device: torch.device, peer: int, tag: int, what: str) -> Transfer:
        """Says which tensors will be sent: a message of always the same size."""
        if len(specs) > MOST_TENSORS or any(len(spec.shape) > MOST_DIMENSIONS for spec in specs):
            raise ValueError(
                f"{what}: at most {MOST_TENSORS} tensors of {MOST_DIMENSIONS} dimensions can be sent at once, got "
                f"{', '.join(map(str, specs))}"
            )
        numbers = [len(specs)]
        for spec in specs:
            dimensions = [*spec.shape, *[0] * (MOST_DIMENSIONS - len(spec.shape))]
            numbers += [DTYPES.index(spec.dtype), len(spec.shape), *dimensions]
        numbers += [0] * (_ANNOUNCED - len(numbers))
        return self.send(torch.tensor(numbers, dtype=torch.int64, device=self._place(device)), peer, tag, what)

    def receive_announcement(self, device: torch.device, peer: int, tag: int, what: str) -> Transfer:
        """Posts a place for such a message; `read_announcement` reads it."""
        return self.receive(TensorSpec((_ANNOUNCED,), torch.int64), self._place(device), peer, tag, what)

    def _place(self, device: torch.device) -> torch.device:
        return HOST if self.backend == dist.Backend.GLOO else device

    # Failures --------------------------------------------------------------------------------------------------------

    def break_off(self) -> None:
        """Has every process that waits for this one fail as well, now and not when its patience ends.

        Gloo closes all connections of a process in a group when one of its waits takes too long: one is made to.
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
                    nothing = torch.empty(1, dtype=torch.uint8, device=HOST)
                    work = dist.irecv(nothing, peer, group=self.group, tag=_NEVER_SENT)
                    assert work is not None
                    work.wait(timedelta(milliseconds=1))


_ANNOUNCED = 1 + MOST_TENSORS * (2 + MOST_DIMENSIONS)
_NEVER_SENT = 2**30


def read_announcement(transfer: Transfer) -> list[TensorSpec]:
    """Which tensors will come; waits for the message."""
    count, *numbers = transfer.wait().tolist()
    each = 2 + MOST_DIMENSIONS
    specs = [numbers[index * each : (index + 1) * each] for index in range(count)]
    return [TensorSpec(tuple(shape[:dimensions]), DTYPES[code]) for code, dimensions, *shape in specs]
