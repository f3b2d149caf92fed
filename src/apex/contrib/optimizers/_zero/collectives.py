"""Reduce-scatter, all-gather and all-reduce, asynchronous, on any backend.

On devices they are those of torch.distributed. In the host's memory, where Gloo has no averages and, depending on the
version, no reduce-scatter and no bfloat16, bytes are exchanged and added up here: in float32, and in the order of the
ranks, so that the result has the same bits wherever a shard lies.

`what` says in an error, where another process does not answer, what has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...._failures import explained
from ....ops._transfer import on_host

# Under their new names where PyTorch has them; the old ones warn there.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class Work(Protocol):
    """Something under way."""

    def wait(self) -> Any:
        """Has what is queued from now on (on the host: the caller) wait until it is done."""

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""


class Done:
    """Nothing is under way."""

    def wait(self) -> None:
        """Returns at once."""

    def is_completed(self) -> bool:
        """It is."""
        return True


class _Exchange:
    """A collective under way."""

    def __init__(self, work: Any, what: str) -> None:
        self._work, self._what = work, what

    def wait(self) -> None:
        with explained(self._what):
            self._work.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()


def begun(what: str, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Work:
    """A collective of torch.distributed, started."""
    with explained(what):
        return _Exchange(collective(*args, **kwargs, async_op=True), what)


class _AddedUp:
    """Contributions of all ranks, [ranks, elements], that are added up when they have arrived."""

    def __init__(self, work: Work, received: Tensor, output: Tensor, factor: float) -> None:
        self._work, self._received, self._output, self._factor = work, received, output, factor

    def wait(self) -> None:
        self._work.wait()
        total = torch.sum(self._received, 0, dtype=torch.promote_types(self._received.dtype, torch.float32))
        self._output.copy_(total.mul_(self._factor) if self._factor != 1.0 else total)

    def is_completed(self) -> bool:
        return self._work.is_completed()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def reduce_scatter(output: Tensor, inputs: Tensor, group: Any, average: bool, what: str) -> Work:
    """`output` becomes this rank's part of the sum (or mean) of `inputs`, which is `ranks` times as long."""
    ranks = dist.get_world_size(group)
    if not on_host(inputs):
        operation = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        return begun(what, _reduce_scatter, output, inputs, op=operation, group=group)
    received = torch.empty_like(inputs)
    work = begun(what, dist.all_to_all_single, _bits(received), _bits(inputs), group=group)
    return _AddedUp(work, received.view(ranks, -1), output, 1.0 / ranks if average else 1.0)


def all_gather(output: Tensor, inputs: Tensor, group: Any, what: str) -> Work:
    """`output` becomes the `inputs` of all ranks, one after the other. `inputs` may be its part of `output`."""
    if not on_host(inputs):
        return begun(what, _all_gather, output, inputs, group=group)
    parts = list(_bits(output).view(dist.get_world_size(group), -1).unbind())
    # Gloo reads and writes at the same time, which a shared memory does not survive.
    shared = inputs.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
    return begun(what, dist.all_gather, parts, _bits(inputs.clone() if shared else inputs), group=group)


def all_reduce(tensor: Tensor, group: Any, what: str, average: bool = False) -> Work:
    """Sum (or mean) over the group, in place."""
    if not on_host(tensor):
        operation = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        return begun(what, dist.all_reduce, tensor, op=operation, group=group)
    ranks = dist.get_world_size(group)
    received = torch.empty(ranks, tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    work = begun(what, dist.all_gather, list(_bits(received).unbind()), _bits(tensor.reshape(-1)), group=group)
    return _AddedUp(work, received, tensor.view(-1), 1.0 / ranks if average else 1.0)
