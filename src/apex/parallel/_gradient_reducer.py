"""The reduction of a model's gradients: pass after pass, in buckets, in the same order in all processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._distributed.collectives import on_stream
from .._distributed.reducer import BucketReducer, Sent
from ._buckets import Arithmetic, Bucket, agree, plan


class GradientReducer(BucketReducer):
    """Sums gradients over all processes; those of a backward pass while it is still going on.

    The first pass only notes the order in which gradients arrive; buckets are made from it, those of rank 0 in all
    processes. From the second pass on a bucket is sent as soon as its gradients, and all buckets before it, are there.
    With `delay` all are sent at the end. Groups take turns with the buckets.
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
        self.buckets: list[Bucket] = []
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
    def is_planned(self) -> bool:
        """Whether buckets have been made."""
        return bool(self.buckets)

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient has arrived in the present pass."""
        return bool(self._arrived)

    @property
    def members(self) -> list[list[int]]:
        """For each bucket, the indices of its parameters."""
        return list(map(list, self._members))

    def _start_round(self) -> None:
        super()._start_round()
        # Parameters in the order in which their gradients have arrived.
        self._arrived: list[int] = []

    def _make_buckets(self, members: list[list[int]]) -> None:
        self._bucket_of = {index: number for number, indices in enumerate(members) for index in indices}
        self._set_buckets(members)
        self.buckets = [
            Bucket(
                [self.params[index] for index in indices],
                [self.names[index] for index in indices],
                self._arithmetic,
                self._retain,
            )
            for indices in members
        ]

    def plan(self) -> None:
        """Make buckets from the order in which gradients have arrived in rank 0."""
        arrived = self._arrived
        members = plan(self.params, arrived, self._message_size, self._triggers)
        self._make_buckets(agree(members, self.params[0].device, self._groups[0]))
        self._arrived = arrived

    def arrived(self, param: Tensor) -> None:
        """Notes that a backward pass has added to a parameter's gradient; sends what can be sent."""
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
        """Sends the rest, and waits for everything; does nothing if no gradient has arrived."""
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
        """Reduces what has not been sent, whatever gradients there are, and waits."""
        self._send_rest()
        self.finish()
        self._start_round()

    def abandon_pass(self) -> None:
        """Forgets a pass that has failed."""
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
    """What buckets depend on; they must be made anew when it changes."""
    return [(id(param), param.dtype, param.device) for param in params]
