"""Pipeline schedules as data: the passes and messages of each rank, in order.

A model is a sequence of stages. Each rank holds one stage, or several as chunks. A schedule lists the forward and
backward passes of each rank in order. `with_messages` then adds the messages, the same way for every schedule: it sorts
all passes by their finish time on a simulated clock, and sends each result that another rank needs right after its
pass. Every message therefore has the same position among all messages at both of its ends. Ranks that follow their
lists never deadlock, whether messages are buffered or not.

m: microbatch, c: chunk of a rank, s: stage. A forward pass goes through the stages 0, 1, 2, ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from ._simulate import finish_times


class ActionKind(Enum):
    """The kind of an action."""

    FORWARD = "F"
    # A whole backward pass. The next two are its parts: gradients of inputs and gradients of parameters.
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    # Send the output of a forward pass to the next stage; receive an input from the previous stage.
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    # Send the gradient of an input to the previous stage; receive the gradient of an output from the next stage.
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"


class Action(NamedTuple):
    """A pass or message of a rank for one microbatch and one of its chunks."""

    kind: ActionKind
    microbatch: int
    chunk: int


class Placement(NamedTuple):
    """The assignment of stages to ranks.

    By default stage s is chunk s // ranks of rank s % ranks. With `folded` (a V of two chunks per rank) the second half
    of the stages is assigned to the ranks in reverse order, so the last stage is on the first rank.
    """

    ranks: int
    chunks: int = 1
    folded: bool = False

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return self.ranks * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Return the stage that is the given chunk of a rank."""
        if self.folded and chunk:
            return self.stages - 1 - rank
        return chunk * self.ranks + rank

    def holder(self, stage: int) -> tuple[int, int]:
        """Return the rank and the chunk that hold a stage."""
        chunk, rank = divmod(stage, self.ranks)
        return (self.ranks - 1 - rank if self.folded and chunk else rank), chunk


class Schedule(NamedTuple):
    """The placement of stages and the list of actions of each rank."""

    placement: Placement
    actions: list[list[Action]]


F, B, I, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT  # noqa: E741
Orders = list[list[Action]]


def forwards(placement: Placement, microbatches: int) -> Orders:
    """Return the order of forward passes, without backward passes; chunks change every `ranks` microbatches."""
    order = [
        Action(F, microbatch, chunk)
        for first in range(0, microbatches, placement.ranks)
        for chunk in range(placement.chunks)
        for microbatch in range(first, min(first + placement.ranks, microbatches))
    ]
    return [list(order) for _ in range(placement.ranks)]


def one_after_the_other(placement: Placement, microbatches: int) -> Orders:
    """Return the order without pipelining: each microbatch goes forward and backward through all chunks of one rank."""
    chunks = range(placement.chunks)
    return [
        [
            action
            for microbatch in range(microbatches)
            for action in (
                *(Action(F, microbatch, chunk) for chunk in chunks),
                *(Action(B, microbatch, chunk) for chunk in reversed(chunks)),
            )
        ]
    ]


def warmup(ranks: int, rank: int, microbatches: int) -> int:
    """Return the number of warm-up forward passes of a rank in the 1F1B schedule."""
    return min(ranks - rank - 1, microbatches)


def one_forward_one_backward(placement: Placement, microbatches: int) -> Orders:
    """Return the 1F1B orders: after a warm-up, forward and backward passes alternate."""
    return [
        _alternating(
            [Action(F, microbatch, 0) for microbatch in range(microbatches)],
            [Action(B, microbatch, 0) for microbatch in range(microbatches)],
            warmup(placement.ranks, rank, microbatches),
        )
        for rank in range(placement.ranks)
    ]


def interleaved(placement: Placement, microbatches: int) -> Orders:
    """Return the interleaved 1F1B orders: chunks of a rank alternate after as many microbatches as there are ranks."""
    ranks, chunks = placement.ranks, placement.chunks
    if microbatches % ranks:
        raise RuntimeError(
            f"the number of microbatches must be a multiple of the number of pipeline ranks, {ranks}, in the "
            f"interleaved schedule, got {microbatches}"
        )
    forward = forwards(placement, microbatches)[0]
    backward = [Action(B, action.microbatch, chunks - 1 - action.chunk) for action in forward]
    ahead = [
        len(forward) if microbatches == ranks else min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, len(forward))
        for rank in range(ranks)
    ]
    return [_alternating(forward, backward, count) for count in ahead]


def _alternating(forward: list[Action], backward: list[Action], ahead: int) -> list[Action]:
    turns = zip(forward[ahead:], backward, strict=False)
    steady = [action for turn in turns for action in turn]
    return [*forward[:ahead], *steady, *backward[len(forward) - ahead :]]


def zero_bubble_h1(placement: Placement, microbatches: int) -> Orders:
    """Return the ZB-H1 orders: 1F1B whose weight gradients are computed when a rank would be idle.

    Rank r delays r of its weight passes, so that it holds as many activations as the first rank.
    """
    orders = []
    for rank in range(placement.ranks):
        ahead = warmup(placement.ranks, rank, microbatches)
        order = [Action(F, microbatch, 0) for microbatch in range(ahead)]
        done = 0
        for microbatch in range(microbatches):
            if ahead + microbatch < microbatches:
                order.append(Action(F, ahead + microbatch, 0))
            order.append(Action(I, microbatch, 0))
            if microbatch >= rank:
                order.append(Action(W, done, 0))
                done += 1
        orders.append([*order, *(Action(W, microbatch, 0) for microbatch in range(done, microbatches))])
    return orders


def zero_bubble_v(placement: Placement, microbatches: int) -> Orders:
    """Return the ZB-V orders: two chunks per rank in a V, so that the first rank also computes the first gradient.

    The order is made for at least 2 ranks - 1 microbatches; passes of surplus microbatches are then removed.
    """
    ranks = placement.ranks
    count = max(microbatches, 2 * ranks - 1)
    orders = []
    for rank in range(ranks):
        order: list[Action] = []
        done: dict[tuple[ActionKind, int], int] = {(kind, chunk): 0 for kind in (F, I, W) for chunk in (0, 1)}

        def run(*steps: tuple[ActionKind, int], order: list[Action] = order, done: dict = done) -> None:
            for step in steps:
                order.append(Action(step[0], done[step], step[1]))
                done[step] += 1

        for _ in range(2 * (ranks - rank) - 1):
            run((F, 0))
        for _ in range(rank):
            run((F, 1), (F, 0))
        for _ in range(ranks - rank):
            run((F, 1), (I, 1), (W, 1))
        while done[F, 1] < count:
            if done[F, 0] < count:
                run((F, 0))
            run((I, 0), (W, 0), (F, 1), (I, 1), (W, 1))
        for _ in range(rank):
            run((I, 0), (I, 1))
        for _ in range(ranks - rank):
            run((I, 0), (W, 0))
        run(*[(W, 1)] * (count - done[W, 1]), *[(W, 0)] * (count - done[W, 0]))
        orders.append([action for action in order if action.microbatch < microbatches])
    return orders


ORDERS: dict[str, Callable[[Placement, int], Orders]] = {
    "no_pipelining": one_after_the_other,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb_h1": zero_bubble_h1,
    "zb_v": zero_bubble_v,
}


# Cached, because all steps of a training run use the same few schedules.
@functools.lru_cache(maxsize=16)
def schedule(name: str, ranks: int, chunks: int, microbatches: int, forward_only: bool = False) -> Schedule:
    """Return the actions of all ranks, messages included; `ORDERS` lists the names."""
    if name not in ORDERS:
        raise ValueError(f"schedule must be one of {', '.join(ORDERS)}, got {name!r}")
    if name == "no_pipelining" and ranks > 1:
        raise ValueError(f"no pipelining needs one pipeline rank, got {ranks}")
    required = {"1f1b": 1, "zb_h1": 1, "zb_v": 2}.get(name, chunks)
    if chunks != required:
        raise ValueError(f"the schedule {name} needs {required} model chunks per rank, got {chunks}")
    placement = Placement(ranks, chunks, folded=name == "zb_v")
    orders = (forwards if forward_only and ranks > 1 else ORDERS[name])(placement, microbatches)
    if forward_only:
        orders = [[action for action in order if action.kind is F] for order in orders]
    return Schedule(placement, with_messages(placement, orders))


def with_messages(placement: Placement, orders: Orders) -> list[list[Action]]:
    """Add a send after each pass whose result another rank needs, and the receive at the same position on that rank."""
    ends = [
        (end, rank, action)
        for rank, (order, times) in enumerate(zip(orders, finish_times(placement, orders), strict=True))
        for action, end in zip(order, times, strict=True)
    ]
    # Passes of one rank never end at the same time, so (end, rank) is unique.
    ends.sort(key=lambda item: item[:2])
    lists: list[list[Action]] = [[] for _ in orders]
    for _, rank, (kind, microbatch, chunk) in ends:
        lists[rank].append(Action(kind, microbatch, chunk))
        stage = placement.stage(rank, chunk)
        if kind is F and stage + 1 < placement.stages:
            other, other_chunk = placement.holder(stage + 1)
            send, receive = ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD
        elif kind in (B, I) and stage > 0:
            other, other_chunk = placement.holder(stage - 1)
            send, receive = ActionKind.SEND_BACKWARD, ActionKind.RECEIVE_BACKWARD
        else:
            continue
        if other != rank:
            lists[rank].append(Action(send, microbatch, chunk))
            lists[other].append(Action(receive, microbatch, other_chunk))
    return lists
