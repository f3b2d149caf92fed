"""Schedules without processes: nothing waits in a circle, bubbles and held activations are as the papers say.

`python -m tests.transformer.pipeline_parallel.test_schedule` tries all numbers of ranks, chunks and microbatches up to
16, 4 and 64, which takes minutes; the tests here some of them.
"""

from __future__ import annotations

import random
import re

import pytest

from apex.transformer.pipeline_parallel._schedule import (
    Action,
    ActionKind,
    Placement,
    Schedule,
    schedule,
    with_messages,
)
from apex.transformer.pipeline_parallel._simulate import COSTS, Deadlock, _needs, finish_times, report

MOST_RANKS, MOST_CHUNKS, MOST_MICROBATCHES = 16, 4, 64
CHUNKS = {"1f1b": (1,), "zb_h1": (1,), "zb_v": (2,), "interleaved": tuple(range(1, MOST_CHUNKS + 1))}
GRID = [
    (name, ranks, chunks, microbatches)
    for name, counts in CHUNKS.items()
    for ranks in range(1, MOST_RANKS + 1)
    for chunks in counts
    for microbatches in range(1, MOST_MICROBATCHES + 1)
    if name != "interleaved" or microbatches % ranks == 0
]
FEW = random.Random(0).sample([case for case in GRID if case[1] * case[2] * case[3] < 300], 80)
CORNERS = [("interleaved", 2, 2, 2), ("interleaved", 16, 4, 64), ("zb_v", 16, 2, 64), ("1f1b", 16, 1, 64)]


def walk(placement: Placement, lists: list[list[Action]]) -> None:
    """Run all lists with messages that wait for their receiver, and check that each pass has its inputs.

    A send and its receive happen together when both ranks have reached them, the strictest behaviour of any backend.
    """
    place = [0] * len(lists)
    known: list[set] = [set() for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while place[rank] < len(actions):
                action = actions[place[rank]]
                letter, stage = action.kind.value, placement.stage(rank, action.chunk)
                if letter in COSTS:
                    missing = set(_needs(letter, action.microbatch, stage, placement.stages)) - known[rank]
                    if missing:
                        raise Deadlock(f"rank {rank} runs {action} without {missing}")
                    results = "BI" if letter == "B" else letter
                    known[rank].update((result, action.microbatch, stage) for result in results)
                elif letter in ("SF", "SB"):
                    step = 1 if letter == "SF" else -1
                    other, chunk = placement.holder(stage + step)
                    there = lists[other][place[other]] if place[other] < len(lists[other]) else None
                    if there is None or (there.kind.value, *there[1:]) != ("R" + letter[1], action.microbatch, chunk):
                        break
                    result = ("F" if letter == "SF" else "I", action.microbatch, stage)
                    if result not in known[rank]:
                        raise Deadlock(f"rank {rank} sends at {action} what it does not have")
                    known[other].add(result)
                    place[other] += 1
                else:  # a receive: the sender moves both
                    break
                place[rank] += 1
                moved = True
    stuck = [f"rank {rank} at {lists[rank][at]}" for rank, at in enumerate(place) if at < len(lists[rank])]
    if stuck:
        raise Deadlock(f"ranks wait for each other: {', '.join(stuck)}")


def check(name: str, ranks: int, chunks: int, microbatches: int) -> None:
    for forward_only in (True, False):
        made = schedule(name, ranks, chunks, microbatches, forward_only)
        walk(*made)
        check_complete(made, microbatches, forward_only)
    found = report(*made)
    idle, held = expected(name, ranks, chunks, microbatches)
    if idle is not None:
        assert max(found.bubbles) == idle, (name, ranks, chunks, microbatches)
    assert all(one <= most for one, most in zip(found.peaks, held, strict=True)), (name, ranks, chunks, microbatches)


def expected(name: str, ranks: int, chunks: int, microbatches: int) -> tuple[float | None, list[int]]:
    """Return the longest idle time of a rank and the largest number of held activations, if F, I and W take time 1."""
    if name == "1f1b":  # (p - 1)(F + I + W)
        return 3.0 * (ranks - 1), [ranks - rank for rank in range(ranks)]
    if name == "zb_h1":  # (p - 1)(F + I - W), and p activations everywhere
        return (ranks - 1.0 if microbatches >= ranks else None), [ranks] * ranks
    if name == "zb_v":  # none at all, and as many activations as p stages of 1F1B have, in halves
        return (0.0 if microbatches >= 2 * ranks - 1 else None), [2 * ranks] * ranks
    # A v-th of 1F1B's, whose passes take v times as long.
    most = [2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1 for rank in range(ranks)]
    if microbatches == ranks:
        most = [ranks * chunks] * ranks
    return 3.0 * (ranks - 1), most


def check_complete(made: Schedule, microbatches: int, forward_only: bool) -> None:
    """Every rank runs each pass of each chunk once, and accumulates gradients in the order of microbatches."""
    for actions in made.actions:
        for chunk in range(made.placement.chunks):
            of_chunk = [action for action in actions if action.chunk == chunk]
            kinds = {
                letter: [action.microbatch for action in of_chunk if action.kind.value == letter] for letter in "FBIW"
            }
            everything = list(range(microbatches))
            assert kinds["F"] == everything
            gradients = [] if forward_only else everything
            assert kinds["B"] + kinds["W"] == gradients
            assert kinds["B"] + kinds["I"] == gradients


@pytest.mark.parametrize("case", [*FEW, *CORNERS], ids=str)
def test_schedules(case: tuple[str, int, int, int]) -> None:
    check(*case)


def test_steps_of_1f1b() -> None:
    found = schedule("1f1b", 2, 1, 2).actions
    assert [" ".join(f"{action.kind.value}{action.microbatch}" for action in actions) for actions in found] == [
        "F0 SF0 F1 SF1 RB0 B0 RB1 B1",
        "RF0 RF1 F0 B0 SB0 F1 B1 SB1",
    ]


def test_placements() -> None:
    loop, folded = Placement(3, 2), Placement(3, 2, folded=True)
    assert [loop.stage(rank, 1) for rank in range(3)] == [3, 4, 5]
    assert [folded.stage(rank, 1) for rank in range(3)] == [5, 4, 3]
    for placement in (loop, folded):
        assert all(placement.stage(*placement.holder(stage)) == stage for stage in range(6))


def test_orders_that_cannot_be_kept_are_found() -> None:
    forward, backward = Action(ActionKind.FORWARD, 0, 0), Action(ActionKind.BACKWARD, 0, 0)
    with pytest.raises(Deadlock, match="rank 0 at"):
        finish_times(Placement(2), [[backward, forward], [forward, backward]])


def test_messages_in_a_circle_are_found() -> None:
    placement, lists = schedule("1f1b", 2, 1, 4)
    send = next(place for place, action in enumerate(lists[1]) if action.kind is ActionKind.SEND_BACKWARD)
    swapped = [list(actions) for actions in lists]
    swapped[1].insert(0, swapped[1].pop(send))
    with pytest.raises(Deadlock, match=r"does not have|wait for each other"):
        walk(placement, swapped)
    # Each sends before it receives: nothing happens where messages wait for their receiver.
    first, second = with_messages(Placement(2), [[Action(ActionKind.FORWARD, m, 0) for m in (0, 1)]] * 2)
    crossed = [first, [second[1], second[0], *second[2:]]]
    with pytest.raises(Deadlock):
        walk(Placement(2), crossed)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("2f2b", 2, 1, 4), "schedule must be one of no_pipelining, 1f1b, interleaved, zb_h1, zb_v, got '2f2b'"),
        (("zb_v", 2, 1, 4), "the schedule zb_v needs 2 model chunks per rank, got 1"),
        (("no_pipelining", 2, 1, 4), "no pipelining needs one pipeline rank, got 2"),
        (("interleaved", 4, 2, 6), "must be a multiple of the number of pipeline ranks, 4, in the interleaved"),
    ],
)
def test_errors(arguments: tuple, words: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=re.escape(words)):
        schedule(*arguments)


if __name__ == "__main__":
    for number, case in enumerate(GRID):
        check(*case)
        if number % 100 == 0:
            print(f"{number} of {len(GRID)}", flush=True)
    print(f"{len(GRID)} schedules: no deadlock, bubbles and peaks as expected")
