"""Buckets: gradients that travel together, and who is in which.

A bucket's buffer ends with one element per parameter: 1 from each process where it has a gradient. A process without
reads there, after the reduction, whether others had one, and nobody waits for anybody who has nothing to send.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._distributed.collectives import Work, start
from .._distributed.reducer import from_first_rank
from ..ops import _graph_numbers
from ..ops._host import HOST, on_host
from ..ops.multi_tensor import scale
from ..ops.multi_tensor.flat import FlatBuffer, offsets_of

# Elements below which a last bucket is not halved.
_SHORT = 4_000_000
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Arithmetic:
    """What happens to gradients around the sum over processes."""

    average: bool = True
    predivide: float = 1.0
    always_fp32: bool = False

    def factors(self, world_size: int, dtype: torch.dtype) -> tuple[float, float]:
        """The factors that gradients are multiplied by before the sum, and the sum after it.

        A power of two is exact before the sum as well, where it costs no pass of its own. Half precision keeps it
        where it was: its sums do overflow, and its small numbers get lost.
        """
        before, after = 1.0 / self.predivide, self.predivide / world_size if self.average else 1.0
        if self.travels_as(dtype) not in _HALF and math.frexp(after)[0] == 0.5:
            return before * after, 1.0
        return before, after

    def travels_as(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which gradients are summed."""
        return torch.float32 if self.always_fp32 and dtype in _HALF else dtype


def multiply(inputs: Sequence[Tensor], outputs: Sequence[Tensor], factor: float) -> None:
    """`outputs[i] = factor * inputs[i]`; the inputs are of one type, and so are the outputs."""
    if not inputs:
        return
    if factor == 1.0:
        torch._foreach_copy_(list(outputs), list(inputs))
    elif on_host(inputs[0]) and inputs[0].dtype == outputs[0].dtype and inputs[0].dtype not in _HALF:
        torch._foreach_copy_(list(outputs), list(inputs))
        torch._foreach_mul_(list(outputs), factor)
    else:
        scale(inputs, outputs, factor)


# Missing in some older PyTorch that was built without CUDA; every gradient counts as shared then.
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_USES_ARE_KNOWN = _use_count is not None


def _storage_uses(tensor: Tensor) -> int:
    """How many tensors share this one's memory, itself included, plus a constant; -1 where PyTorch cannot tell."""
    return -1 if _use_count is None else _use_count(tensor.untyped_storage()._cdata)


def _uses_of_gradient(param: Tensor) -> tuple[int, int]:
    gradient = param.grad
    assert gradient is not None
    return sys.getrefcount(gradient), _storage_uses(gradient)


@functools.cache
def _uses_if_unshared() -> tuple[int, int]:
    """What `_uses_of_gradient` gives for a gradient that nobody holds but its parameter."""
    param = torch.empty(1, dtype=torch.float32, device=HOST, requires_grad=True)
    param.grad = torch.empty_like(param)
    return _uses_of_gradient(param)


def _gradient_is_unshared(param: Tensor) -> bool:
    """Whether nobody would notice if `param.grad` became another tensor with the same values."""
    if _use_count is None or type(param.grad) is not Tensor or param.grad.requires_grad:
        return False
    return _uses_of_gradient(param) == _uses_if_unshared()


class Bucket:
    """The gradients of some parameters of one dtype and device, in one buffer that is summed over all processes.

    After a pass gradients are views of the buffer, which saves copying them back, and their memory. A gradient that
    other code refers to is written to instead of replaced; a buffer that other code refers to is not used again. With
    `retain` all gradients become views, and each pass has a buffer of its own.
    """

    _buffer: FlatBuffer | None = None
    # The end of it, with an element for each parameter.
    _present: Tensor

    def __init__(self, params: Sequence[Tensor], names: Sequence[str], arithmetic: Arithmetic, retain: bool) -> None:
        self.params = list(params)
        self.names = list(names)
        # The mean of the last pass, where it is to be kept.
        self.retained: Tensor | None = None
        self._retain = retain
        self._before, self._after = arithmetic.factors(dist.get_world_size(), self.params[0].dtype)
        self._buffer_dtype = arithmetic.travels_as(self.params[0].dtype)
        self._offsets, self.size = self._layout()
        self._own_uses = 0
        # Of the pass under way: parameters without a gradient here, and those whose gradient is not in its place.
        self._missing: list[int] = []
        self._outside: list[int] = []
        self._gives_views = _USES_ARE_KNOWN and self._buffer_dtype == self.params[0].dtype and not retain

    def __str__(self) -> str:
        first, last = self.names[0], self.names[-1]
        return f"{len(self.names)} gradients ({first} to {last})" if len(self.names) > 1 else f"the gradient of {first}"

    @torch.no_grad()
    def start(self, group: Any, on_own_stream: bool = False) -> Work:
        """Sends the gradients that there are.

        Those that can become views of the buffer do so now, and their memory is free for others; with `on_own_stream`
        only when all is over, since it is still being read.
        """
        self._prepare_buffer()
        if (capture := _graph_numbers.capturing()) is not None:
            capture.kept.append(self._buffer)  # a graph goes on to write to it, whatever becomes of the bucket
        self._missing, self._outside, gradients, places = [], [], [], []
        for index, (param, place) in enumerate(zip(self.params, self._places, strict=True)):
            self._check_shape(index)
            gradient = param.grad
            if gradient is None:
                place.zero_()
                self._missing.append(index)
            elif gradient.layout != torch.strided:
                raise RuntimeError(
                    f"the gradient of {self.names[index]} is sparse; DistributedDataParallel and Reducer take dense "
                    "gradients only: use sparse=False in embeddings"
                )
            elif not self._is_inside(index):
                self._outside.append(index)
                gradients.append(gradient.detach())
                places.append(place)
            elif self._before != 1.0:
                place.mul_(self._before)
        multiply(gradients, places, self._before)
        gradient, gradients = None, []  # nothing here may hold what is asked about next
        if self._gives_views and not on_own_stream:
            self._outside = [index for index in self._outside if not self._becomes_view(index)]
        self._present.fill_(1)
        for index in self._missing:
            self._present[index] = 0
        return start(f"the reduction of {self}", dist.all_reduce, self._flat.values, group=group)

    @torch.no_grad()
    def finish(self) -> None:
        """Gives the sum, which has arrived, to the parameters."""
        # Only who lacks a gradient has to ask the device whether others have it.
        others = self._present.tolist() if self._missing else []
        self._outside += [index for index in self._missing if others[index]]
        if self._retain:
            self._give_retained()
        elif self._gives_views:
            if self._after != 1.0:
                self._flat.values[: self.size].mul_(self._after)
            self._write([index for index in self._outside if not self._becomes_view(index)], 1.0)
        else:
            self._write(self._outside, self._after)

    def abandon(self) -> None:
        """Forgets the buffer of a pass that failed: other processes may still send to it."""
        self._buffer = None

    def _layout(self) -> tuple[list[int], int]:
        """Where gradients start in the buffer, and what they take: a retained buffer has nothing in between."""
        if not self._retain:
            return offsets_of(self.params)
        offsets = list(itertools.accumulate((param.numel() for param in self.params), initial=0))
        return offsets[:-1], offsets[-1]

    def _check_shape(self, index: int) -> None:
        """Raises where a parameter, or a gradient from before it changed, is not of the shape that its bucket has."""
        param, expected = self.params[index], self._places[index].shape
        if param.shape != expected or (param.grad is not None and param.grad.shape != expected):
            gradient = "" if param.grad is None else f" and a gradient of shape {tuple(param.grad.shape)}"
            raise RuntimeError(
                f"parameter {self.names[index]} has shape {tuple(param.shape)}{gradient}, but its bucket was made for "
                f"shape {tuple(expected)}: after param.data has been replaced by another shape, in all processes, "
                "clear gradients and wrap the model again"
            )

    def _is_inside(self, index: int) -> bool:
        """Whether a parameter's gradient is in its place already."""
        return self._buffer is not None and self._buffer.holds(index, self.params[index].grad)

    @property
    def _flat(self) -> FlatBuffer:
        assert self._buffer is not None
        return self._buffer

    @property
    def _places(self) -> list[Tensor]:
        return self._flat.views

    def _prepare_buffer(self) -> None:
        """Makes a new buffer, unless there is one that only this bucket and its gradients refer to."""
        if self._buffer is not None and not self._retain:
            inside = sum(map(self._is_inside, range(len(self.params))))
            if _storage_uses(self._buffer.values) == self._own_uses + inside:
                return
        size = self.size + len(self.params)
        self._buffer = FlatBuffer(self.params, self._offsets, size, self._buffer_dtype)
        self._present = self._buffer.values[self.size :]
        self._own_uses = _storage_uses(self._buffer.values)

    def _becomes_view(self, index: int) -> bool:
        """Makes a gradient a view of the buffer, unless other code refers to it; returns whether it is one now."""
        param = self.params[index]
        if param.grad is not None and not _gradient_is_unshared(param):
            return False
        param.grad = self._places[index].data  # a tensor of its own, by which the buffer is seen to be in use
        return True

    def _write(self, indices: Sequence[int], factor: float) -> None:
        """Copies values of the buffer to gradients that lie outside it."""
        gradients = []
        for param in (self.params[index] for index in indices):
            if param.grad is None:
                param.grad = torch.empty_like(param)
            gradients.append(param.grad.detach())
        multiply([self._places[index] for index in indices], gradients, factor)

    def _give_retained(self) -> None:
        """All gradients become views of the mean."""
        mean, dtype = self._flat.values[: self.size], self.params[0].dtype
        if self._after != 1.0:
            mean.mul_(self._after)
        self.retained, places = mean, self._places
        if mean.dtype != dtype:
            copy = FlatBuffer(self.params, self._offsets, self.size, dtype)
            self.retained, places = copy.values.copy_(mean), copy.views
        for index in self._outside:
            self.params[index].grad = places[index]


def plan(
    params: Sequence[Tensor], arrived: Sequence[int], message_size: int | None, triggers: Iterable[int] | None
) -> list[list[int]]:
    """Buckets of indices, in the order in which they are to be sent.

    Gradients are taken in the order in which they arrived. A bucket is of one dtype and device; it is closed when it
    has `message_size` elements (None: never), or by a gradient that is one of the `triggers`. Nothing of the backward
    pass is left to overlap the last bucket: while it is large it is halved, so that the first half can go earlier.
    Parameters whose gradients did not arrive have buckets of their own at the end, so that no other waits for them.
    """
    closers = None if triggers is None else set(triggers)
    buckets: list[list[int]] = []
    seen = set(arrived)
    for indices in (arrived, [index for index in range(len(params)) if index not in seen]):
        open_buckets: dict[Any, list[int]] = {}
        elements: dict[Any, int] = {}
        for index in indices:
            kind = params[index].dtype, params[index].device
            open_buckets.setdefault(kind, []).append(index)
            elements[kind] = elements.get(kind, 0) + params[index].numel()
            if closers is not None:
                full = index in closers
            else:
                full = message_size is not None and elements[kind] >= message_size
            if full:
                buckets.append(open_buckets.pop(kind))
                elements[kind] = 0
        buckets.extend(open_buckets.values())
        if closers is None and message_size is not None and buckets and indices is arrived:
            buckets[-1:] = _halved(buckets[-1], params)
    return buckets


def _halved(bucket: list[int], params: Sequence[Tensor]) -> list[list[int]]:
    """A bucket cut in two, and the second half again, down to `_SHORT` elements."""
    parts = []
    while (size := sum(params[index].numel() for index in bucket)) > _SHORT and len(bucket) > 1:
        count, half = 0, 0
        while count < len(bucket) - 1 and half < size // 2:
            half += params[bucket[count]].numel()
            count += 1
        parts.append(bucket[:count])
        bucket = bucket[count:]
    return [*parts, bucket]


def agree(buckets: list[list[int]], device: torch.device, group: Any) -> list[list[int]]:
    """Return the buckets that rank 0 has planned."""
    order = [index for bucket in buckets for index in bucket]
    numbers = [number for number, bucket in enumerate(buckets) for _ in bucket]
    agreed: dict[int, list[int]] = {}
    for index, number in zip(*from_first_rank([order, numbers], device, group), strict=True):
        agreed.setdefault(number, []).append(index)
    return list(agreed.values())
