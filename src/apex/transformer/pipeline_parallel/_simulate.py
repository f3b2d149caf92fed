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
