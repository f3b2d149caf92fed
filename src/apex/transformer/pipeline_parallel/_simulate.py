"""Simulation of pipeline schedules on a clock: finish times of passes, idle time, activations held."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Cost of each kind of pass. A whole backward pass (B) costs as much as its two parts (I and W).
COSTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


class Deadlock(RuntimeError):
    """Raised for an order of passes that makes ranks wait for each other."""


class ScheduleReport(NamedTuple):
    """The cost of a schedule.

    `span`: time until all passes are done. `bubbles`: each rank's idle time between its first and last pass. `peaks`:
    the largest number of (microbatch, chunk) pairs whose activations each rank holds at once.
    """

    span: float
    bubbles: list[float]
    peaks: list[int]


def finish_times(placement: Any, orders: Sequence[Sequence[Any]], costs: Mapping[str, float] = COSTS) -> list[list]:
    """Return the finish time of each pass of each rank, if passes run in order and messages take no time."""
    times: list[list[float]] = [[] for _ in orders]
    ended: dict[tuple[str, int, int], float] = {}
    waiting: dict[tuple[str, int, int], int] = {}
    ready = deque(range(len(orders)))
    while ready:
        rank = ready.popleft()
        order, rank_times = orders[rank], times[rank]
        while len(rank_times) < len(order):
            kind, microbatch, chunk = order[len(rank_times)]
            letter, stage = kind.value, placement.stage(rank, chunk)
            start = rank_times[-1] if rank_times else 0.0
            required = _needs(letter, microbatch, stage, placement.stages)
            missing = next((requirement for requirement in required if requirement not in ended), None)
            if missing is not None:
                waiting[missing] = rank
                break
            end = max([start, *(ended[requirement] for requirement in required)]) + costs[letter]
            rank_times.append(end)
            for result in "BI" if letter == "B" else letter:
                ended[result, microbatch, stage] = end
                if (result, microbatch, stage) in waiting:
                    ready.append(waiting.pop((result, microbatch, stage)))
    stuck = [rank for rank, rank_times in enumerate(times) if len(rank_times) < len(orders[rank])]
    if stuck:
        heads = ", ".join(f"rank {rank} at {orders[rank][len(times[rank])]}" for rank in stuck)
        raise Deadlock(f"the order of passes cannot be kept: {heads}")
    return times


def _needs(letter: str, microbatch: int, stage: int, stages: int) -> list[tuple[str, int, int]]:
    """Return the passes whose results a pass needs."""
    if letter == "F":
        return [("F", microbatch, stage - 1)] if stage else []
    if letter == "W":
        return [("I", microbatch, stage)]
    return [("F", microbatch, stage), *([("I", microbatch, stage + 1)] if stage + 1 < stages else [])]


def report(placement: Any, orders: Sequence[Sequence[Any]], costs: Mapping[str, float] = COSTS) -> ScheduleReport:
    """Return span, bubbles and peaks of the passes in `orders`; messages are ignored."""
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
    return ScheduleReport(max((ends[-1] for ends in times if ends), default=0.0), bubbles, peaks)
