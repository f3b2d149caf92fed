"""The order of sending buckets, without processes: it follows the arrival of gradients, and nothing is sent twice."""

from __future__ import annotations

import gc
from unittest import mock

import torch

from apex._distributed import reducer
from apex._distributed.collectives import Done
from apex._distributed.reducer import BucketReducer, Sent, weak_method
from tests.support.drawn import given, settings, st

BUCKETS = st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=5)


class Recorder(BucketReducer):
    """A reducer that records the buckets it sends and receives."""

    def __init__(self, buckets: list[set[int]]) -> None:
        super().__init__()
        self.buckets = buckets
        self.arrived: set[int] = set()
        self.sent: list[int] = []
        self.early: list[int] = []
        self.received: list[int] = []
        self._set_buckets(buckets)

    def gradient(self, param: int) -> None:
        self.arrived.add(param)
        self._note(param, [number for number, members in enumerate(self.buckets) if param in members])
        self.flush_ready()

    def end(self, in_flight: int | None = None) -> None:
        self._send_rest(in_flight)
        self.finish()
        self._start_round()
        self.arrived.clear()

    def _start(self, bucket: int) -> Sent:
        self.sent.append(bucket)
        if not self.buckets[bucket] <= self.arrived:
            self.early.append(bucket)
        return Sent(bucket, Done())

    def _receive(self, sent: Sent) -> None:
        self.received.append(sent.bucket)


@settings(max_examples=100, deadline=None)
@given(BUCKETS, st.lists(st.integers(0, 5)), st.none() | st.integers(1, 3))
def test_every_bucket_is_sent_once_and_in_order(buckets: list[set[int]], params: list[int], most: int | None) -> None:
    recorder = Recorder(buckets)
    for _ in range(2):
        recorder.sent.clear()
        recorder.early.clear()
        for param in params:
            recorder.gradient(param)
        assert not recorder.early, "sent before its gradients"
        complete = [members <= set(params) for members in buckets]
        assert len(recorder.sent) == (complete.index(False) if False in complete else len(buckets))
        recorder.end(most)
        assert recorder.sent == list(range(len(buckets)))
        assert recorder.received[-len(buckets) :] == recorder.sent


def test_buckets_follow_the_order_of_the_first_process() -> None:
    """Buckets that were not completed come last, in their old order."""
    recorder = Recorder([{0}, {1}, {2}, {3}])
    for param in (2, 1):
        recorder.gradient(param)
    with mock.patch.object(reducer.dist, "broadcast") as broadcast:
        recorder._agree_on_order(torch.device("cpu"), None, 0)
    assert broadcast.call_args.args[0].tolist() == [2, 1, 0, 3]
    recorder.sent.clear()
    recorder.end()
    assert recorder.sent == [2, 1, 0, 3]


def test_a_bucket_whose_reduction_failed_stays_under_way() -> None:
    """Its memory, which others may still write to, is therefore not used again."""
    recorder = Recorder([{0}])
    recorder._send_rest()
    recorder._under_way[0].work = mock.Mock(wait=mock.Mock(side_effect=RuntimeError("no answer")))
    try:
        recorder.finish()
    except RuntimeError:
        assert [sent.bucket for sent in recorder._under_way] == [0]
    else:
        raise AssertionError("the failure was passed over")
    assert not recorder.received


def test_a_hook_does_not_keep_its_owner() -> None:
    class Owner:
        calls: list[int] = []  # noqa: RUF012

        def called(self, number: int) -> None:
            self.calls.append(number)

    owner = Owner()
    hook = weak_method(owner, Owner.called)
    hook(1)
    del owner
    gc.collect()
    hook(2)
    assert Owner.calls == [1]
