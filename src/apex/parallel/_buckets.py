"""Buckets of gradients that are sent together, and the assignment of parameters to buckets.

A bucket's buffer ends with one flag per parameter: each process adds 1 if it has a gradient. After the reduction a
process without a gradient reads there whether another process had one. Processes with nothing to send delay nobody.
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

# A last bucket with fewer elements is not halved.
_MIN_HALVED = 4_000_000
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Arithmetic:
    """The scaling of gradients before and after their sum over processes."""

    average: bool = True
    predivide: float = 1.0
    always_fp32: bool = False

    def factors(self, world_size: int, dtype: torch.dtype) -> tuple[float, float]:
        """Return the factor for gradients before the sum, and the factor for the sum.

        A power of two is exact, so it is applied before the sum, where it needs no pass of its own. In half precision
        it stays after the sum, because sums may overflow and small numbers may vanish.
        """
        before, after = 1.0 / self.predivide, self.predivide / world_size if self.average else 1.0
        if self.sum_dtype(dtype) not in _HALF and math.frexp(after)[0] == 0.5:
            return before * after, 1.0
        return before, after

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the sum of gradients of this dtype."""
        return torch.float32 if self.always_fp32 and dtype in _HALF else dtype


def multiply(inputs: Sequence[Tensor], outputs: Sequence[Tensor], factor: float) -> None:
    """Set `outputs[i] = factor * inputs[i]`; inputs have one dtype, and outputs have one dtype."""
    if not inputs:
        return
    if factor == 1.0:
        torch._foreach_copy_(list(outputs), list(inputs))
    elif on_host(inputs[0]) and inputs[0].dtype == outputs[0].dtype and inputs[0].dtype not in _HALF:
        torch._foreach_copy_(list(outputs), list(inputs))
        torch._foreach_mul_(list(outputs), factor)
    else:
        scale(inputs, outputs, factor)


# Missing in some older PyTorch builds without CUDA. Every gradient then counts as shared.
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_USES_ARE_KNOWN = _use_count is not None


def _storage_uses(tensor: Tensor) -> int:
    """Return how many tensors share this one's memory, plus a constant, or -1 if PyTorch cannot tell."""
    return -1 if _use_count is None else _use_count(tensor.untyped_storage()._cdata)


def _uses_of_gradient(param: Tensor) -> tuple[int, int]:
    """Return the reference counts of a parameter's gradient and of its memory."""
    gradient = param.grad
    assert gradient is not None
    return sys.getrefcount(gradient), _storage_uses(gradient)


@functools.cache
def _uses_if_unshared() -> tuple[int, int]:
    """Return the reference counts of a gradient that only its parameter refers to."""
    param = torch.empty(1, dtype=torch.float32, device=HOST, requires_grad=True)
    param.grad = torch.empty_like(param)
    return _uses_of_gradient(param)


def _gradient_is_unshared(param: Tensor) -> bool:
    """Return True if only the parameter refers to `param.grad`, so that another tensor may replace it."""
    if _use_count is None or type(param.grad) is not Tensor or param.grad.requires_grad:
        return False
    return _uses_of_gradient(param) == _uses_if_unshared()


class GradientBucket:
    """The gradients of parameters of one dtype and device, in one buffer that is summed over all processes.

    After a pass, gradients are views of the buffer, which saves copying them back and saves their memory. A gradient
    that other code refers to is written to instead of replaced. A buffer that other code refers to is not used again.
    With `retain` all gradients become views, and each pass has a new buffer.
    """

    _buffer: FlatBuffer | None = None
    # End of the buffer: one flag per parameter.
    _present: Tensor

    def __init__(self, params: Sequence[Tensor], names: Sequence[str], arithmetic: Arithmetic, retain: bool) -> None:
        self.params = list(params)
        self.names = list(names)
        # The averaged gradients of the last pass, if `retain` is set.
        self.retained: Tensor | None = None
        self._retain = retain
        self._before, self._after = arithmetic.factors(dist.get_world_size(), self.params[0].dtype)
        self._buffer_dtype = arithmetic.sum_dtype(self.params[0].dtype)
        self._offsets, self.size = self._layout()
        self._own_uses = 0
        # In the current pass: indices of parameters without a gradient in this process, and of parameters whose
        # gradient lies outside the buffer.
        self._missing: list[int] = []
        self._outside: list[int] = []
        self._gives_views = _USES_ARE_KNOWN and self._buffer_dtype == self.params[0].dtype and not retain

    def __str__(self) -> str:
        first, last = self.names[0], self.names[-1]
        return f"{len(self.names)} gradients ({first} to {last})" if len(self.names) > 1 else f"the gradient of {first}"

    @torch.no_grad()
    def start(self, group: Any, on_own_stream: bool = False) -> Work:
        """Copy the gradients into the buffer and start its all-reduce.

        Gradients become views of the buffer now, if they can, which frees their memory. With `on_own_stream` they
        become views at the end of the pass, because the stream is still reading them.
        """
        self._prepare_buffer()
        if (capture := _graph_numbers.capturing()) is not None:
            capture.kept.append(self._buffer)  # the graph writes to the buffer at every replay, so it must stay alive
        self._missing, self._outside, gradients, views = [], [], [], []
        for index, (param, view) in enumerate(zip(self.params, self._views, strict=True)):
            self._check_shape(index)
            gradient = param.grad
            if gradient is None:
                view.zero_()
                self._missing.append(index)
            elif gradient.layout != torch.strided:
                raise RuntimeError(
                    f"the gradient of {self.names[index]} is sparse; DistributedDataParallel and Reducer take dense "
                    "gradients only: use sparse=False in embeddings"
                )
            elif not self._is_inside(index):
                self._outside.append(index)
                gradients.append(gradient.detach())
                views.append(view)
            elif self._before != 1.0:
                view.mul_(self._before)
        multiply(gradients, views, self._before)
        gradient, gradients = None, []  # drop references before references are counted
        if self._gives_views and not on_own_stream:
            self._outside = [index for index in self._outside if not self._make_view(index)]
        self._present.fill_(1)
        for index in self._missing:
            self._present[index] = 0
        return start(f"the reduction of {self}", dist.all_reduce, self._flat.values, group=group)

    @torch.no_grad()
    def finish(self) -> None:
        """Set the parameters' gradients to the reduced values."""
        # Only a process without a gradient must read from the device whether others have one.
        others = self._present.tolist() if self._missing else []
        self._outside += [index for index in self._missing if others[index]]
        if self._retain:
            self._give_retained()
        elif self._gives_views:
            if self._after != 1.0:
                self._flat.values[: self.size].mul_(self._after)
            self._write([index for index in self._outside if not self._make_view(index)], 1.0)
        else:
            self._write(self._outside, self._after)

    def abandon(self) -> None:
        """Drop the buffer of a failed pass, because other processes may still write to it."""
        self._buffer = None

    def _layout(self) -> tuple[list[int], int]:
        """Return the start of each gradient in the buffer and the total size; a retained buffer has no gaps."""
        if not self._retain:
            return offsets_of(self.params)
        offsets = list(itertools.accumulate((param.numel() for param in self.params), initial=0))
        return offsets[:-1], offsets[-1]

    def _check_shape(self, index: int) -> None:
        """Raise if the shape of a parameter or of its gradient has changed since the bucket was made."""
        param, expected = self.params[index], self._views[index].shape
        if param.shape != expected or (param.grad is not None and param.grad.shape != expected):
            gradient = "" if param.grad is None else f" and a gradient of shape {tuple(param.grad.shape)}"
            raise RuntimeError(
                f"parameter {self.names[index]} has shape {tuple(param.shape)}{gradient}, but its bucket was made for "
                f"shape {tuple(expected)}: after param.data has been replaced by another shape, in all processes, "
                "clear gradients and wrap the model again"
            )

    def _is_inside(self, index: int) -> bool:
        """Return True if a parameter's gradient is already a view of its part of the buffer."""
        return self._buffer is not None and self._buffer.holds(index, self.params[index].grad)

    @property
    def _flat(self) -> FlatBuffer:
        assert self._buffer is not None
        return self._buffer

    @property
    def _views(self) -> list[Tensor]:
        return self._flat.views

    def _prepare_buffer(self) -> None:
        """Make a new buffer, unless only this bucket and its gradients refer to the old one."""
        if self._buffer is not None and not self._retain:
            inside = sum(map(self._is_inside, range(len(self.params))))
            if _storage_uses(self._buffer.values) == self._own_uses + inside:
                return
        size = self.size + len(self.params)
        self._buffer = FlatBuffer(self.params, self._offsets, size, self._buffer_dtype)
        self._present = self._buffer.values[self.size :]
        self._own_uses = _storage_uses(self._buffer.values)

    def _make_view(self, index: int) -> bool:
        """Make a gradient a view of the buffer unless other code refers to it; return True if it is a view now."""
        param = self.params[index]
        if param.grad is not None and not _gradient_is_unshared(param):
            return False
        param.grad = self._views[index].data  # a new tensor, so that the reference count shows the buffer's use
        return True

    def _write(self, indices: Sequence[int], factor: float) -> None:
        """Copy values of the buffer to gradients that lie outside of it."""
        gradients = []
        for param in (self.params[index] for index in indices):
            if param.grad is None:
                param.grad = torch.empty_like(param)
            gradients.append(param.grad.detach())
        multiply([self._views[index] for index in indices], gradients, factor)

    def _give_retained(self) -> None:
        """Make all gradients views of the reduced buffer, in the parameters' dtype."""
        mean, dtype = self._flat.values[: self.size], self.params[0].dtype
        if self._after != 1.0:
            mean.mul_(self._after)
        self.retained, views = mean, self._views
        if mean.dtype != dtype:
            copy = FlatBuffer(self.params, self._offsets, self.size, dtype)
            self.retained, views = copy.values.copy_(mean), copy.views
        for index in self._outside:
            self.params[index].grad = views[index]


def plan(
    params: Sequence[Tensor], arrived: Sequence[int], message_size: int | None, triggers: Iterable[int] | None
) -> list[list[int]]:
    """Return buckets of parameter indices in the order of sending.

    Gradients are taken in order of arrival. A bucket has one dtype and device. It is closed when it has `message_size`
    elements (None: never), or by a gradient in `triggers`. The last bucket cannot overlap with the backward pass, so a
    large one is halved repeatedly to send its first half earlier. Parameters whose gradients did not arrive have their
    own buckets at the end, so that no other bucket waits for them.
    """
    trigger_set = None if triggers is None else set(triggers)
    buckets: list[list[int]] = []
    seen = set(arrived)
    for indices in (arrived, [index for index in range(len(params)) if index not in seen]):
        open_buckets: dict[Any, list[int]] = {}
        elements: dict[Any, int] = {}
        for index in indices:
            kind = params[index].dtype, params[index].device
            open_buckets.setdefault(kind, []).append(index)
            elements[kind] = elements.get(kind, 0) + params[index].numel()
            if trigger_set is not None:
                full = index in trigger_set
            else:
                full = message_size is not None and elements[kind] >= message_size
            if full:
                buckets.append(open_buckets.pop(kind))
                elements[kind] = 0
        buckets.extend(open_buckets.values())
        if trigger_set is None and message_size is not None and buckets and indices is arrived:
            buckets[-1:] = _halved(buckets[-1], params)
    return buckets


def _halved(bucket: list[int], params: Sequence[Tensor]) -> list[list[int]]:
    """Cut a bucket in two, and the second half again, until it has at most `_MIN_HALVED` elements."""
    parts = []
    while (size := sum(params[index].numel() for index in bucket)) > _MIN_HALVED and len(bucket) > 1:
        count, half = 0, 0
        while count < len(bucket) - 1 and half < size // 2:
            half += params[bucket[count]].numel()
            count += 1
        parts.append(bucket[:count])
        bucket = bucket[count:]
    return [*parts, bucket]


def agree(buckets: list[list[int]], device: torch.device, group: Any) -> list[list[int]]:
    """Return rank 0's buckets, so that all ranks have the same."""
    order = [index for bucket in buckets for index in bucket]
    numbers = [number for number, bucket in enumerate(buckets) for _ in bucket]
    planned: dict[int, list[int]] = {}
    for index, number in zip(*from_first_rank([order, numbers], device, group), strict=True):
        planned.setdefault(number, []).append(index)
    return list(planned.values())
