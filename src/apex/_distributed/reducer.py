"""Reduction of gradients in buckets during the backward pass, in the same order in all processes."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._failures import explained
from ..ops._device import real_tensors
from .collectives import Work


@dataclass
class Sent:
    """A bucket that is being reduced: its values, and the tensor of the result if the reduction is not in place."""

    bucket: int
    work: Work
    values: Tensor | None = None
    result: Tensor | None = None


class BucketReducer:
    """A reducer that sends each bucket once per round, when its gradients have arrived and earlier buckets are sent.

    A round is one backward pass, or several that accumulate gradients. At its end, buckets that lack gradients are sent
    without them, because processes may have gradients of different parameters, and all must send all buckets in the
    same order.

    A subclass sets the parameters of the buckets (`_set_buckets`), reports gradients (`_note`), fills and sends a
    bucket (`_start`) and takes the result (`_receive`).
    """

    def __init__(self) -> None:
        # The parameters of each bucket, and the order of sending.
        self._members: list[Collection[int]] = []
        self._order: list[int] = []
        self._under_way: deque[Sent] = deque()
        self._start_round()

    def _set_buckets(self, members: Iterable[Collection[int]]) -> None:
        self._members = list(members)
        self._order = list(range(len(self._members)))
        self._start_round()

    def _start_round(self) -> None:
        self._sent: set[int] = set()
        self._waiting_for = [set(members) for members in self._members]
        # Complete buckets, in the order of arrival of their last gradient.
        self._complete: dict[int, None] = {}

    def _start(self, bucket: int) -> Sent:
        raise NotImplementedError

    def _receive(self, sent: Sent) -> None:
        raise NotImplementedError

    def _note(self, param: int, buckets: Iterable[int]) -> None:
        """Record that the gradient of a parameter, which lies in these buckets, has been computed."""
        for bucket in buckets:
            self._waiting_for[bucket].discard(param)
            if not self._waiting_for[bucket]:
                self._complete.pop(bucket, None)
                self._complete[bucket] = None

    @property
    def _all_sent(self) -> bool:
        return len(self._sent) == len(self._order)

    def flush_ready(self) -> None:
        """Send complete buckets in order, up to the first incomplete one."""
        while not self._all_sent and not self._waiting_for[self._order[len(self._sent)]]:
            self._send_next()

    def _send_rest(self, in_flight: int | None = None) -> None:
        """Send the remaining buckets; at most `in_flight` are in progress at a time."""
        while not self._all_sent:
            while in_flight is not None and len(self._under_way) >= in_flight:
                self._finish_first()
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._order[len(self._sent)]
        self._sent.add(bucket)
        self._under_way.append(self._start(bucket))

    def finish(self) -> None:
        """Wait for all buckets in progress."""
        while self._under_way:
            self._finish_first()

    def _finish_first(self) -> None:
        sent = self._under_way[0]
        sent.work.wait()
        self._under_way.popleft()
        self._receive(sent)

    def _agree_on_order(self, device: torch.device, group: Any, root: int) -> None:
        """Adopt the first process's order of bucket completion in this round as the order of sending."""
        order = dict.fromkeys([*self._complete, *self._order])
        self._order = from_first_rank(list(order), device, group, root)


def weak_method(owner: Any, method: Callable[[Any, Any], None]) -> Callable[[Any], None]:
    """Return a hook that calls a method of `owner` while `owner` is alive; parameters may outlive it."""
    reference = weakref.ref(owner)

    def call(argument: Any) -> None:
        alive = reference()
        if alive is not None:
            method(alive, argument)

    return call


def from_first_rank(numbers: list[Any], device: torch.device, group: Any = None, root: int = 0) -> list[Any]:
    """Return the first process's integers, or lists of integers of equal length."""
    with explained("agreeing on the order of gradients with the first process"), real_tensors():
        values = torch.tensor(numbers, dtype=torch.int64, device=device)
        dist.broadcast(values, root, group=group)
        return values.tolist()
