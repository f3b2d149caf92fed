"""Buckets: gradients that travel together, and who is in which.

A bucket's buffer ends with one element per parameter: 1 from each process where it has a gradient. A process without
reads there, after the reduction, whether others had one, and nobody waits for anybody who has nothing to send.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops._transfer import on_host
from ..ops.multi_tensor import scale

# Elements from which a call of its own for a tensor costs less than passing over it twice.
_LARGE = 1 << 14
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Arithmetic:
    """What happens to gradients around the sum over processes."""

    average: bool = True
    predivide: float = 1.0
    always_fp32: bool = False

    @property
    def before(self) -> float:
        """The factor of gradients on their way out."""
        return 1.0 / self.predivide

    def after(self, world_size: int) -> float:
        """The factor of their sum."""
        return self.predivide / world_size if self.average else 1.0

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
        _multiply_on_host(inputs, outputs, factor)
    else:
        scale(inputs, outputs, factor)


def _multiply_on_host(inputs: Sequence[Tensor], outputs: Sequence[Tensor], factor: float) -> None:
    """20 million elements in 5.6 ms on one core, where passes that copy and then multiply take 10 ms."""
    few_from, few_to = [], []
    for one, other in zip(inputs, outputs, strict=True):
        if one.numel() >= _LARGE:
            torch.mul(one, factor, out=other)
        else:
            few_from.append(one)
            few_to.append(other)
    if few_from:
        torch._foreach_copy_(few_to, few_from)
        torch._foreach_mul_(few_to, factor)


class Bucket:
    """The gradients of some parameters of one dtype and device, in one buffer that is summed over all processes."""

    def __init__(self, params: Sequence[Tensor], names: Sequence[str], arithmetic: Arithmetic, retain: bool) -> None:
        self.params = list(params)
        self.size = sum(param.numel() for param in self.params)
        # The mean of the last pass, where gradients are views of it.
        self.retained: Tensor | None = None
        self._names = names
        self._arithmetic = arithmetic
        self._retain = retain
        self._places: list[Tensor] = []
        self._missing: list[int] = []
        self._work: Any = None

    @torch.no_grad()
    def start(self, group: Any) -> None:
        """Sends the gradients that there are."""
        self._make_buffer()
        self._missing, gradients, places = [], [], []
        for index, (param, place) in enumerate(zip(self.params, self._places, strict=True)):
            gradient = param.grad
            if gradient is None:
                place.zero_()
                self._missing.append(index)
                continue
            if gradient.layout != torch.strided:
                raise RuntimeError(
                    f"the gradient of {self._names[index]} is sparse; DistributedDataParallel and Reducer take dense "
                    "gradients only: use sparse=False in embeddings"
                )
            gradients.append(gradient.detach())
            places.append(place)
        multiply(gradients, places, self._arithmetic.before)
        self._present.fill_(1)
        for index in self._missing:
            self._present[index] = 0
        self._work = dist.all_reduce(self._buffer, group=group, async_op=True)

    @torch.no_grad()
    def finish(self, world_size: int) -> None:
        """Waits for the sum and gives it to the parameters."""
        self._work.wait()
        self._work = None
        # Only who lacks a gradient has to ask the device whether others have it.
        others = self._present.tolist() if self._missing else []
        absent = {index for index in self._missing if not others[index]}
        factor = self._arithmetic.after(world_size)
        if self._retain:
            self._give_views(factor, absent)
            return
        places, gradients = [], []
        for index, (param, place) in enumerate(zip(self.params, self._places, strict=True)):
            if index in absent:
                continue
            if param.grad is None:
                param.grad = torch.empty_like(param)
            places.append(place)
            gradients.append(param.grad.detach())
        multiply(places, gradients, factor)

    def abandon(self) -> None:
        """Forgets what is under way, without waiting for processes that may never send; it keeps its buffer."""
        if self._work is not None:
            self._work = None
            self._places = []

    def _make_buffer(self) -> None:
        """A new buffer in every pass if gradients become views of it, else the same one."""
        if self._places and not self._retain:
            return
        first = self.params[0]
        self._buffer = torch.empty(
            self.size + len(self.params), dtype=self._arithmetic.travels_as(first.dtype), device=first.device
        )
        self._present = self._buffer[self.size :]
        self._places = self._views_of(self._buffer)

    def _views_of(self, buffer: Tensor) -> list[Tensor]:
        parts = buffer[: self.size].split([param.numel() for param in self.params])
        # `.data`: with a version counter of its own, as if the views had nothing to do with each other.
        return [part.view(param.shape).data for part, param in zip(parts, self.params, strict=True)]

    def _give_views(self, factor: float, absent: set[int]) -> None:
        mean = self._buffer[: self.size]
        if factor != 1.0:
            mean.mul_(factor)
        dtype = self.params[0].dtype
        self.retained = mean.to(dtype)
        places = self._places if mean.dtype == dtype else self._views_of(self.retained)
        for index, (param, place) in enumerate(zip(self.params, places, strict=True)):
            if index not in absent:
                param.grad = place


def plan(
    params: Sequence[Tensor], arrived: Sequence[int], message_size: int | None, triggers: Iterable[int] | None
) -> list[list[int]]:
    """Buckets of indices, in the order in which they are to be sent.

    Gradients are taken in the order in which they arrived. A bucket is of one dtype and device; it is closed when it
    has `message_size` elements (None: never), or by a gradient that is one of the `triggers`. Parameters whose
    gradients did not arrive have buckets of their own at the end, so that none waits for them.
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
    return buckets


def agree(buckets: list[list[int]], count: int, device: torch.device) -> list[list[int]]:
    """The buckets that rank 0 has planned for its `count` parameters."""
    order = [index for bucket in buckets for index in bucket]
    numbers = [number for number, bucket in enumerate(buckets) for _ in bucket]
    encoded = torch.tensor([order, numbers], dtype=torch.int64, device=device).reshape(2, count)
    dist.broadcast(encoded, 0)
    agreed: dict[int, list[int]] = {}
    for index, number in zip(*encoded.tolist(), strict=True):
        agreed.setdefault(number, []).append(index)
    return list(agreed.values())
