"""All-reduce, reduce-scatter and all-gather, asynchronous, on any backend.

On devices they are those of torch.distributed. In the host's memory, where Gloo has no averages and, depending on the
version, no reduce-scatter and no bfloat16, bytes are exchanged and added up here: in float32, and in the order of the
ranks, so that the result has the same bits wherever a shard lies. A device's tensors of a Gloo group, which several
processes that share one GPU have, go through the host's memory.

`what` says in an error, where another process does not answer, what has failed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .._failures import explained
from ..ops._host import HOST, on_host

# Under their new names where PyTorch has them; the old ones warn there.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Has what is queued from now on (on the host: the caller) wait until it is done."""

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""


class Done:
    """A collective with nothing to do."""

    def wait(self) -> None:
        """Returns at once."""

    def is_completed(self) -> bool:
        """Always true."""
        return True


class _Started:
    """A collective of torch.distributed under way."""

    def __init__(self, work: Any, what: str) -> None:
        self._work, self._what = work, what

    def wait(self) -> None:
        with explained(self._what):
            self._work.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()


def start(what: str, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Work:
    """Starts a collective of torch.distributed."""
    with explained(what):
        return _Started(collective(*args, **kwargs, async_op=True), what)


class _Finished:
    """A collective, and what is done with its result when it has arrived."""

    def __init__(self, work: Work, finish: Callable[[], Any]) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> None:
        self._work.wait()
        self._finish()

    def is_completed(self) -> bool:
        return self._work.is_completed()


class _FollowedByAnother(_Finished):
    """A collective that another one follows: it is not done when the first one is."""

    def is_completed(self) -> bool:
        return False


def _host_sum(work: Work, received: Tensor, output: Tensor, average: bool) -> Work:
    """Adds up contributions of all ranks, [ranks, elements], when they have arrived."""

    def add_up() -> None:
        total = torch.sum(received, 0, dtype=torch.promote_types(received.dtype, torch.float32))
        output.copy_(total.mul_(1.0 / len(received)) if average else total)

    return _Finished(work, add_up)


def _through_host(tensor: Tensor, group: Any) -> bool:
    return not on_host(tensor) and dist.get_backend(group) == dist.Backend.GLOO


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _operation(average: bool, factor: Tensor | None, dtype: torch.dtype, group: Any) -> Any:
    if factor is None:
        return dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    factor = factor / dist.get_world_size(group) if average else factor
    return dist._make_nccl_premul_sum(factor.to(dtype))  # type: ignore[attr-defined]


def can_multiply_while_reducing() -> bool:
    """Whether the backend takes a `factor` without a pass of its own, as NCCL does."""
    return hasattr(dist, "_make_nccl_premul_sum") and dist.get_backend() == "nccl"


def reduce_scatter(
    output: Tensor, inputs: Tensor, group: Any, average: bool, what: str, factor: Tensor | None = None
) -> Work:
    """`output` becomes this rank's part of the sum (or mean) of `inputs`, which is `ranks` times as long.

    Each rank's inputs are multiplied by its `factor`, float32 [1]: see `can_multiply_while_reducing`.
    """
    if _through_host(inputs, group):
        result = torch.empty_like(output, device=HOST)
        host_factor = None if factor is None else factor.cpu()
        work = reduce_scatter(result, inputs.cpu(), group, average, what, host_factor)
        return _Finished(work, lambda: output.copy_(result))
    if not on_host(inputs):
        operation = _operation(average, factor, output.dtype, group)
        return start(what, _reduce_scatter, output, inputs, op=operation, group=group)
    inputs = inputs if factor is None else inputs * factor
    received = torch.empty_like(inputs)
    work = start(what, dist.all_to_all_single, _bits(received), _bits(inputs), group=group)
    return _host_sum(work, received.view(dist.get_world_size(group), -1), output, average)


def all_gather(output: Tensor, inputs: Tensor, group: Any, what: str) -> Work:
    """`output` becomes the `inputs` of all ranks, one after the other. `inputs` may be its part of `output`."""
    if _through_host(inputs, group):
        result = torch.empty_like(output, device=HOST)
        return _Finished(all_gather(result, inputs.cpu(), group, what), lambda: output.copy_(result))
    if not on_host(inputs):
        return start(what, _all_gather, output, inputs, group=group)
    parts = list(_bits(output).view(dist.get_world_size(group), -1).unbind())
    # Gloo reads and writes at the same time, which a shared memory does not survive.
    shared = inputs.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
    return start(what, dist.all_gather, parts, _bits(inputs.clone() if shared else inputs), group=group)


def all_reduce(tensor: Tensor, group: Any, what: str, average: bool = False, factor: Tensor | None = None) -> Work:
    """Sum (or mean) over the group, in place, of what each rank has, times its `factor` as in `reduce_scatter`."""
    if _through_host(tensor, group):
        result = tensor.cpu()
        work = all_reduce(result, group, what, average, None if factor is None else factor.cpu())
        return _Finished(work, lambda: tensor.copy_(result))
    if not on_host(tensor):
        operation = _operation(average, factor, tensor.dtype, group)
        return start(what, dist.all_reduce, tensor, op=operation, group=group)
    inputs = tensor if factor is None else tensor * factor
    received = torch.empty(dist.get_world_size(group), tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    work = start(what, dist.all_gather, list(_bits(received).unbind()), _bits(inputs.reshape(-1)), group=group)
    return _host_sum(work, received, tensor.view(-1), average)


def reduce_scatter_all_reduce(
    output: Tensor, inputs: Tensor, groups: tuple[Any, Any], average: bool, what: str, stream: Any, factor: Any = None
) -> Work:
    """A reduce-scatter over the first group and an all-reduce of `output` over the second: of hosts, or replicas.

    Both go on `stream`, so that nothing but the second waits for the first.
    """
    shards, replicas = groups
    with on_stream(stream):
        first = reduce_scatter(output, inputs, shards, average, what, factor)
        if on_host(inputs):
            # On the host nothing starts by itself.
            return _FollowedByAnother(first, lambda: all_reduce(output, replicas, what, average).wait())
        first.wait()
        return all_reduce(output, replicas, what, average)


@contextlib.contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Queues what is inside on `stream`, after what is queued on the current one; None is the current one."""
    if stream is None:
        yield
        return
    current = torch.accelerator.current_stream(stream.device)
    stream.wait_stream(current)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(current)


def wait_for(stream: Any) -> None:
    """Has what is queued from now on wait for what is queued on `stream`; None is the current one."""
    if stream is not None:
        torch.accelerator.current_stream(stream.device).wait_stream(stream)


def broadcast(tensor: Tensor, source: int, group: Any, what: str) -> None:
    """`tensor` of the global rank `source` to all of the group, in place; waits for it."""
    there = tensor.cpu() if _through_host(tensor, group) else tensor
    start(what, dist.broadcast, there, source, group=group).wait()
    if there is not tensor:
        tensor.copy_(there)
