"""Asynchronous all-reduce, reduce-scatter, all-gather and all-to-all on any backend.

On devices these are torch.distributed's collectives. For host tensors Gloo lacks averages and, depending on the
version, reduce-scatter and bfloat16. There, bytes are exchanged and added here, in float32 and in rank order, so the
result has the same bits on every rank. Device tensors of a Gloo group (several processes that share one GPU) are copied
through host memory.

`description` describes the operation in the error that is raised if another process does not answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .._failures import explained
from ..ops._device import on_stream
from ..ops._host import HOST, on_host

# PyTorch's new names if they exist, because the old ones then warn.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class Work(Protocol):
    """A collective in progress."""

    def wait(self) -> Any:
        """Wait until the collective is done; on a device only the current stream waits."""

    def is_completed(self) -> bool:
        """Return True if `wait` would return at once."""


class Done:
    """A collective with nothing to do."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Return True."""
        return True


class _TorchWork:
    """A collective of torch.distributed in progress."""

    def __init__(self, work: Any, description: str) -> None:
        self._work, self._what = work, description

    def wait(self) -> None:
        with explained(self._what):
            self._work.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()


def start(description: str, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Work:
    """Start a collective of torch.distributed."""
    with explained(description):
        return _TorchWork(collective(*args, **kwargs, async_op=True), description)


class _WorkWithCallback:
    """A collective and a function that processes its result."""

    def __init__(self, work: Work, finish: Callable[[], Any]) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> None:
        self._work.wait()
        self._finish()

    def is_completed(self) -> bool:
        return self._work.is_completed()


class _TwoStageWork(_WorkWithCallback):
    """A collective that is followed by a second one, so its completion does not complete the work."""

    def is_completed(self) -> bool:
        return False


def _host_sum(work: Work, received: Tensor, output: Tensor, average: bool) -> Work:
    """Return work that waits for the contributions of all ranks, [ranks, elements], and adds them up."""

    def add_up() -> None:
        total = torch.sum(received, 0, dtype=torch.promote_types(received.dtype, torch.float32))
        output.copy_(total.mul_(1.0 / len(received)) if average else total)

    return _WorkWithCallback(work, add_up)


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
    """Return True if the backend applies a `factor` without an extra pass, as NCCL does."""
    return hasattr(dist, "_make_nccl_premul_sum") and dist.get_backend() == "nccl"


def reduce_scatter(
    output: Tensor, inputs: Tensor, group: Any, average: bool, description: str, factor: Tensor | None = None
) -> Work:
    """Write this rank's part of the sum (or mean) of `inputs` to `output`; `inputs` is `ranks` times as long.

    Each rank's inputs are multiplied by its `factor`, float32 [1]: see `can_multiply_while_reducing`.
    """
    if _through_host(inputs, group):
        result = torch.empty_like(output, device=HOST)
        host_factor = None if factor is None else factor.cpu()
        work = reduce_scatter(result, inputs.cpu(), group, average, description, host_factor)
        return _WorkWithCallback(work, lambda: output.copy_(result))
    if not on_host(inputs):
        operation = _operation(average, factor, output.dtype, group)
        return start(description, _reduce_scatter, output, inputs, op=operation, group=group)
    inputs = inputs if factor is None else inputs * factor
    received = torch.empty_like(inputs)
    work = start(description, dist.all_to_all_single, _bits(received), _bits(inputs), group=group)
    return _host_sum(work, received.view(dist.get_world_size(group), -1), output, average)


def all_gather(output: Tensor, inputs: Tensor, group: Any, description: str) -> Work:
    """Write the `inputs` of all ranks to `output`, in rank order. `inputs` may be this rank's part of `output`."""
    if _through_host(inputs, group):
        result = torch.empty_like(output, device=HOST)
        return _WorkWithCallback(all_gather(result, inputs.cpu(), group, description), lambda: output.copy_(result))
    if not on_host(inputs):
        return start(description, _all_gather, output, inputs, group=group)
    parts = list(_bits(output).view(dist.get_world_size(group), -1).unbind())
    # Gloo reads and writes at the same time, so inputs must not share memory with the output.
    shared = inputs.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
    return start(description, dist.all_gather, parts, _bits(inputs.clone() if shared else inputs), group=group)


def all_reduce(
    tensor: Tensor, group: Any, description: str, average: bool = False, factor: Tensor | None = None
) -> Work:
    """Replace a tensor by its sum (or mean) over the group; each rank's tensor is first multiplied by its `factor`."""
    if _through_host(tensor, group):
        result = tensor.cpu()
        work = all_reduce(result, group, description, average, None if factor is None else factor.cpu())
        return _WorkWithCallback(work, lambda: tensor.copy_(result))
    if not on_host(tensor):
        operation = _operation(average, factor, tensor.dtype, group)
        return start(description, dist.all_reduce, tensor, op=operation, group=group)
    inputs = tensor if factor is None else tensor * factor
    received = torch.empty(dist.get_world_size(group), tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    work = start(description, dist.all_gather, list(_bits(received).unbind()), _bits(inputs.reshape(-1)), group=group)
    return _host_sum(work, received, tensor.view(-1), average)


def all_to_all(
    output: Tensor,
    inputs: Tensor,
    output_sizes: Sequence[int],
    input_sizes: Sequence[int],
    group: Any,
    description: str,
) -> Work:
    """Send parts of the vector `inputs` to all ranks, in rank order, and write the parts that they send to `output`."""
    if _through_host(inputs, group):
        result = torch.empty_like(output, device=HOST)
        work = all_to_all(result, inputs.cpu(), output_sizes, input_sizes, group, description)
        return _WorkWithCallback(work, lambda: output.copy_(result))
    if on_host(inputs):  # as bytes, because not every version of Gloo takes bfloat16
        width = inputs.element_size()
        output_sizes, input_sizes = ([size * width for size in sizes] for sizes in (output_sizes, input_sizes))
        output, inputs = _bits(output), _bits(inputs)
    sizes = (list(output_sizes), list(input_sizes))
    return start(description, dist.all_to_all_single, output, inputs, *sizes, group=group)


def reduce_scatter_all_reduce(
    output: Tensor,
    inputs: Tensor,
    groups: tuple[Any, Any],
    average: bool,
    description: str,
    stream: Any,
    factor: Any = None,
) -> Work:
    """Reduce-scatter over the first group, then all-reduce `output` over the second group (hosts or replicas).

    Both run on `stream`, so that only the all-reduce waits for the reduce-scatter.
    """
    shards, replicas = groups
    with on_stream(stream):
        first = reduce_scatter(output, inputs, shards, average, description, factor)
        if on_host(inputs):
            # On the host no stream starts the second collective, so `wait` does.
            return _TwoStageWork(first, lambda: all_reduce(output, replicas, description, average).wait())
        first.wait()
        return all_reduce(output, replicas, description, average)


def wait_for(stream: Any) -> None:
    """Make the current stream wait for the work queued on `stream`; None does nothing."""
    if stream is not None:
        torch.accelerator.current_stream(stream.device).wait_stream(stream)


def gather_objects(value: Any, description: str, group: Any = None) -> list[Any]:
    """Return the small objects that all processes of a group (None: all) passed, by rank.

    Without a process group the result is `[value]`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    with explained(description):
        dist.all_gather_object(values, value, group=group)
    return values


def broadcast(tensor: Tensor, source: int, group: Any, description: str) -> None:
    """Copy `tensor` from the global rank `source` to all ranks of the group, in place, and wait."""
    buffer = tensor.cpu() if _through_host(tensor, group) else tensor
    start(description, dist.broadcast, buffer, source, group=group).wait()
    if buffer is not tensor:
        tensor.copy_(buffer)
