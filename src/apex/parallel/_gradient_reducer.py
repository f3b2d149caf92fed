"""The reduction of a model's gradients in buckets, in the same order in all processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._distributed.reducer import BucketReducer, Sent
from ..ops._device import on_stream
from ._buckets import Arithmetic, GradientBucket, agree, plan


class GradientReducer(BucketReducer):
    """A reducer that sums gradients over all processes while the backward pass still runs.

    The first pass only records the order of arrival of the gradients. Buckets are made from rank 0's order and are the
    same in all processes. From the second pass on, a bucket is sent as soon as its gradients have arrived and all
    buckets before it are sent. With `delay` all buckets are sent at the end. Buckets alternate between the groups.
    """

    def __init__(
        self,
        named_params: Sequence[tuple[str, Tensor]],
        arithmetic: Arithmetic,
        *,
        message_size: int | None = None,
        triggers: Sequence[Tensor] | None = None,
        retain: bool = False,
        delay: bool = False,
        groups: Sequence[Any] = (None,),
        streams: Sequence[Any] = (None,),
    ) -> None:
        self.names = [name for name, _ in named_params]
        self.params = [param for _, param in named_params]
        self.signature = signature_of(self.params)
        self.buckets: list[GradientBucket] = []
        self._index = {param: index for index, param in enumerate(self.params)}
        self._arithmetic = arithmetic
        self._message_size = message_size
        self._triggers = (
            None if triggers is None else [self._index[param] for param in triggers if param in self._index]
        )
        self._retain = retain
        self._delay = delay
        self._groups = groups
        self._streams = streams
        super().__init__()
        if delay:
            self._make_buckets(plan(self.params, range(len(self.params)), None, None))

    @property
    def has_gradients(self) -> bool:
        """Return True if a gradient has arrived in the current pass."""
        return bool(self._arrived)

    @property
    def members(self) -> list[list[int]]:
        """Return the parameter indices of each bucket."""
        return list(map(list, self._members))

    def _start_round(self) -> None:
        super()._start_round()
        # Parameter indices in order of arrival of their gradients.
        self._arrived: list[int] = []

    def _make_buckets(self, members: list[list[int]]) -> None:
        self._bucket_of = {index: number for number, indices in enumerate(members) for index in indices}
        self._set_buckets(members)
        self.buckets = [
            GradientBucket(
                [self.params[index] for index in indices],
                [self.names[index] for index in indices],
                self._arithmetic,
                self._retain,
            )
            for indices in members
        ]

    def plan(self) -> None:
        """Make buckets from the order of arrival of gradients on rank 0."""
        arrived = self._arrived
        members = plan(self.params, arrived, self._message_size, self._triggers)
        self._make_buckets(agree(members, self.params[0].device, self._groups[0]))
        self._arrived = arrived

    def arrived(self, param: Tensor) -> None:
        """Record that the backward pass has added to a parameter's gradient, and send complete buckets."""
        index = self._index.get(param)
        if index is None:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} got a gradient, but required none at the last call of the "
                "wrapped model: call the wrapper, not its .module, after parameters have been unfrozen"
            )
        if not self.buckets or self._delay:
            if index not in self._arrived[-1:]:
                self._arrived.append(index)
            return
        number = self._bucket_of[index]
        if number in self._sent:
            raise RuntimeError(
                f"the gradient of {self.names[index]} changed after it had been sent to the other processes: one "
                "backward pass has added to it several times (a shared parameter under reentrant checkpointing?). Use "
                "delay_allreduce=True, or use_reentrant=False"
            )
        self._arrived.append(index)
        self._note(index, (number,))
        if not self._waiting_for[number]:
            self.flush_ready()

    def finish_pass(self) -> None:
        """Send the remaining buckets and wait for all; do nothing if no gradient has arrived."""
        if not self._arrived:
            return
        self._arrived = list(dict.fromkeys(self._arrived))
        try:
            if not self.buckets:
                self.plan()
            self.reduce_all()
        except BaseException:
            self.abandon_pass()
            raise

    def reduce_all(self) -> None:
        """Send all remaining buckets, even without new gradients, and wait."""
        self._send_rest()
        self.finish()
        self._start_round()

    def abandon_pass(self) -> None:
        """Discard a pass that has failed."""
        for sent in self._under_way:
            self.buckets[sent.bucket].abandon()
        self._under_way.clear()
        self._start_round()

    def _start(self, bucket: int) -> Sent:
        stream = self._streams[bucket % len(self._streams)]
        group = self._groups[bucket % len(self._groups)]
        with on_stream(stream):
            return Sent(bucket, self.buckets[bucket].start(group, on_own_stream=stream is not None))

    def _receive(self, sent: Sent) -> None:
        self.buckets[sent.bucket].finish()


def signature_of(params: Sequence[Tensor]) -> list[Any]:
    """Return the identity, dtype and device of each parameter; buckets must be remade when they change."""
    return [(id(param), param.dtype, param.device) for param in params]
