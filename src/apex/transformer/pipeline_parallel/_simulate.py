"""Pipeline schedules run on a clock instead of processes: when passes end, what is idle, what is held at most."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# How long passes take, by the letter of their kind; a whole backward pass is both of its parts.
COSTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


class Deadlock(RuntimeError):
    """Ranks wait for each other."""


class Report(NamedTuple):
    """What a schedule costs each rank.

    `bubbles`: time between a rank's first and last pass in which it is idle. `span`: time until all is done.
    `peaks`: the largest number of (microbatch, chunk) whose activations a rank holds at once.
    """

    span: float
    bubbles: list[float]
    peaks: list[int]


def finish_times(placement: Any, orders: Sequence[Sequence[Any]], costs: Mapping[str, float] = COSTS) -> list[list]:
    """When each pass of each rank ends, if ranks run them in their order and messages take no time."""
    times: list[list[float]] = [[] for _ in orders]
    ended: dict[tuple[str, int, int], float] = {}
    waiting: dict[tuple[str, int, int], int] = {}
    ready = deque(range(len(orders)))
    while ready:
        rank = ready.popleft()
        order, mine = orders[rank], times[rank]
        while len(mine) < len(order):
            kind, microbatch, chunk = order[len(mine)]
            letter, stage = kind.value, placement.stage(rank, chunk)
            start = mine[-1] if mine else 0.0
            needs = _needs(letter, microbatch, stage, placement.stages)
            missing = next((need for need in needs if need not in ended), None)
            if missing is not None:
                waiting[missing] = rank
                break
            end = max([start, *(ended[need] for need in needs)]) + costs[letter]
            mine.append(end)
            for result in "BI" if letter == "B" else letter:
                ended[result, microbatch, stage] = end
                if (result, microbatch, stage) in waiting:
                    ready.append(waiting.pop((result, microbatch, stage)))
    stuck = [rank for rank, mine in enumerate(times) if len(mine) < len(orders[rank])]
    if stuck:
        heads = ", ".join(f"rank {rank} at {orders[rank][len(times[rank])]}" for rank in stuck)
        raise Deadlock(f"the order of passes cannot be kept: {heads}")
    return times


def _needs(letter: str, microbatch: int, stage: int, stages: int) -> list[tuple[str, int, int]]:
    """The passes whose results a pass needs."""
    if letter == "F":
        return [("F", microbatch, stage - 1)] if stage else []
    if letter == "W":
        return [("I", microbatch, stage)]
    return [("F", microbatch, stage), *([("I", microbatch, stage + 1)] if stage + 1 < stages else [])]


def report(placement: Any, orders: Sequence[Sequence[Any]], costs: Mapping[str, float] = COSTS) -> Report:
    """Bubbles and peaks of orders of passes; messages among them are left out."""
    passes = [[action for action in order if action.kind.value in costs] for order in orders]
    times = finish_times(placement, passes, costs)
    bubbles, peaks = [], []
    for order, ends in zip(passes, times, strict=True):
        spent = [costs[action.kind.value] for action in order]
        bubbles.append(ends[-1] - (ends[0] - spent[0]) - sum(spent) if order else 0.0)
        held = peak = 0
        for action in order:
            held += {"F": 1, "B": -1, "W": -1}.get(action.kind.value, 0)
            peak = max(peak, held)
        peaks.append(peak)
    return Report(max((ends[-1] for ends in times if ends), default=0.0), bubbles, peaks)


def walk(placement: Any, lists: Sequence[Sequence[Any]]) -> None:
    """Follows all lists with messages that wait for their receiver, and checks that each pass has what it needs.

    A send and its receive happen together, when both ranks have come to them: the strictest that any backend may be.
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
