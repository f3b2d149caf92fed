"""`apex bench --sweep`: random cases, ours beside PyTorch's operators, to find the shapes where ours is slow.

A case is checked against a float64 reference, then every implementation is timed in turns: on the GPU alone, behind a
delay that hides the host's work, and between two events as a training script sees it. Each call finds a cold cache.

The fastest round of each implementation counts. When all rounds counted, two timings of the same PyTorch operators
between events on a virtual machine differed by more than 5% in 46 of 172 passes: for seconds such a host takes three
times as long, and its work is then no longer hidden behind the GPU's. Passes that are slower are measured again later.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from .._atomic import atomic_file
from ..ops._examples import Random
from . import cores, sweep_cases, timing
from .check import worst_excess
from .environment import describe
from .registry import OURS, Call, Prepared
from .runner import _describe
from .sweep_cases import Passes

# Calls per round on the GPU alone and between events. The latter need a few calls to warm the host's caches.
ROUNDS, GPU_CALLS, EVENT_CALLS = 3, 4, 8
SLOW_CALL = 2e3  # host microseconds above which a round has fewer calls: an optimizer of many tensors, one by one
MOST_HOST = 10_000  # longest time in microseconds that a GPU waits for the host
ROUNDS_WHERE_SLOWER = 12  # rounds of the second measurement
LIMIT = 1.05  # times PyTorch's time: above it a case counts as slower
BINS = (0.5, 0.7, 0.9, 1.0, LIMIT, 1.2, 1.5)
WORST = 12  # number of cases printed
CPU_ELEMENTS, GPU_ELEMENTS = 1 << 12, 1 << 26  # largest number of elements of a case
TIMES = {"gpu": "on the GPU", "events": "between events"}

# A record of one direction of a case: microseconds by implementation in "gpu" and "events", our time over the best of
# PyTorch's in "gpu_ratio" and "events_ratio", and in "error" our op's fault, or None.
Row = dict[str, Any]


def sweep_families(names: str) -> list[str]:
    """Return the families in a comma-separated list; "all" stands for all of them."""
    known = sweep_cases.families()
    wanted = list(known) if names == "all" else names.split(",")
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"no sweep of {', '.join(unknown)}; known: all, {', '.join(known)}")
    return wanted


def drawn_cases(
    families: Sequence[str], cases: int, seed: int, device: torch.device, words: str | None = None
) -> Iterator[tuple[str, str, Callable[[], Passes]]]:
    """Yield family, name and maker of each case. They depend only on the seed, the family and the case's number.

    `words` keeps the cases whose name contains all of them.
    """
    needed, known = (words or "").lower().split(), sweep_cases.families()
    for family in families:
        for number in range(cases):
            random = Random(f"{seed} {family} {number}", GPU_ELEMENTS if device.type == "cuda" else CPU_ELEMENTS)
            name, make = known[family](random, device)
            if all(word in f"{family} {name}".lower() for word in needed):
                yield family, f"{family} {name}", make


def run_sweep(
    drawn: Iterable[tuple[str, str, Callable[[], Passes]]],
    device: torch.device,
    path: Path | None,
    console: Console,
    about: Mapping[str, Any],
    *,
    all_cores: bool = False,
) -> int:
    """Measure the cases, print a summary of each family and return an exit status: 1 if one of ours was wrong.

    The file at `path`, if given, is rewritten after every case, so that an interrupted run loses none; it starts with
    `about`.
    """
    head = json.dumps({**describe(device), **about})[:-1]
    rows: list[Row] = []
    on_one_core = device.type == "cuda" and not all_cores and cores.may_be_chosen()
    core = cores.one_core if on_one_core else contextlib.nullcontext
    for family, cases in itertools.groupby(drawn, key=lambda case: case[0]):
        begin, first = time.perf_counter(), len(rows)
        slower: list[tuple[dict[str, Row], str, Callable[[], Passes]]] = []
        for _, name, make in cases:
            case_rows: dict[str, Row] = {}
            with core():
                _measure(case_rows, name, make, device, ROUNDS)
            rows += case_rows.values()
            if any(map(_is_slower, case_rows.values())):
                slower.append((case_rows, name, make))
            _write(path, head, rows)
        for again in slower:
            with core():
                _measure(*again, device, ROUNDS_WHERE_SLOWER)
            _write(path, head, rows)
        print_summary(family, rows[first:], time.perf_counter() - begin, console)
        if path is not None:
            console.print(f"results: {path}", markup=False)
    return int(any(row["error"] is not None for row in rows))


def _write(path: Path | None, head: str, rows: Sequence[Row]) -> None:
    if path is None:
        return
    with atomic_file(path, "w") as file:
        file.write(head + ',\n"passes": [' + ",\n".join(map(json.dumps, rows)) + "]}\n")


def _measure(rows: dict[str, Row], name: str, make: Callable[[], Passes], device: torch.device, rounds: int) -> None:
    """Check and time the passes of a case; if they have rows already, measure the slower ones again.

    If a pass fails, its row holds the error.
    """

    def row_of(direction: str) -> Row:
        new: Row = {"case": f"{name} {direction}".strip(), "family": name.split()[0], "gpu": {}, "events": {}}
        return rows.setdefault(direction, new | {"gpu_ratio": None, "events_ratio": None, "error": None})

    try:
        prepared = make()
    except Exception as error:
        row_of(next(iter(rows), ""))["error"] = _describe(error)
        return
    for direction, each in prepared.items():
        if direction in rows and not _is_slower(rows[direction]):
            continue
        row = row_of(direction)
        try:
            excess = worst_excess(each.implementations[OURS]()(), each.expected)
            if not excess <= 1:
                row["error"] = f"error is {excess:.3g} times the tolerance"
                continue
            _time(row, each, device, rounds)
        except Exception as error:
            row["error"] = _describe(error)


def _time(row: Row, prepared: Prepared, device: torch.device, rounds: int) -> None:
    """Store the times of a pass, the fastest so far of each implementation, and their ratios."""
    calls = {peer: make() for peer, make in (prepared.timed or prepared.implementations).items()}
    for kind, times in zip(TIMES, compare(calls, device, rounds), strict=True):
        row[kind] = {name: min(value, row[kind].get(name, value)) for name, value in times.items()}
        row[f"{kind}_ratio"] = _ratio(row[kind])


def _is_slower(row: Row) -> bool:
    return any((row[f"{kind}_ratio"] or 0.0) > LIMIT for kind in TIMES)


def _ratio(*passes: Mapping[str, float]) -> float | None:
    """Return our time over the best of PyTorch's; for several passes, the sum of ours over the sum of the best."""
    if not all(OURS in times and len(times) > 1 for times in passes):
        return None
    best = sum(min(value for name, value in times.items() if name != OURS) for times in passes)
    return round(sum(times[OURS] for times in passes) / best, 4)


def compare(calls: Mapping[str, Call], device: torch.device, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return each call's microseconds on the GPU alone (nothing on a CPU) and between events: its best round's median.

    Rounds take the calls in turns, forwards and backwards, so that none always comes first. The garbage collector is
    off, because its runs would affect whichever call is being timed.
    """
    alone: dict[str, list[float]] = {name: [] for name in calls}
    whole: dict[str, list[float]] = {name: [] for name in calls}
    # By the third call, kernels are compiled and launches cached.
    host = {name: min([_host(call, device) for _ in range(3)][-1], MOST_HOST) for name, call in calls.items()}
    collects = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            for name, call in list(calls.items())[:: -1 if turn % 2 else 1]:
                if device.type == "cuda":
                    fewer, delay = 1 + int(host[name] / SLOW_CALL), timing.delay_cycles(host[name])
                    alone[name].append(median(timing.event_samples(call, -(-GPU_CALLS // fewer), delay)))
                    whole[name].append(median(timing.event_samples(call, -(-EVENT_CALLS // fewer))))
                else:
                    whole[name].append(_host(call, device))
    finally:
        if collects:
            gc.enable()
    gpu, events = ({name: round(min(each), 2) for name, each in kind.items() if each} for kind in (alone, whole))
    return gpu, events


def _host(call: Call, device: torch.device) -> float:
    """Return the microseconds that a call keeps the host busy."""
    timing.synchronize(device)
    begin = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - begin)


def print_summary(family: str, rows: Sequence[Row], seconds: float, console: Console) -> None:
    """Print a histogram of our time over PyTorch's, the slowest passes, and errors.

    It also counts slower cases, with both passes together, because a training step always runs both.
    """
    console.print(f"\n{family}: {len(rows)} passes in {seconds:.0f} s", style="bold", markup=False)
    for kind, words in TIMES.items():
        rated = [row for row in rows if row[f"{kind}_ratio"] is not None]
        if not rated:
            continue
        by_case = itertools.groupby(rated, lambda row: row["case"].removesuffix(" fwd").removesuffix(" bwd"))
        cases = [_ratio(*(row[kind] for row in passes)) for _, passes in by_case]
        rated.sort(key=lambda row: -row[f"{kind}_ratio"])
        passes = [row[f"{kind}_ratio"] for row in rated]
        counts = Counter(bisect.bisect_left(BINS, ratio) for ratio in passes)
        bounds = [*(f"to {bound:g}" for bound in BINS), "more"]
        histogram = "  ".join(f"{bound}: {counts[index]}" for index, bound in enumerate(bounds))
        console.print(f"ours / torch {words}: {histogram}", markup=False)
        for ratios, what in ((passes, "passes"), (cases, "cases")):
            slower = sum((ratio or 0.0) > LIMIT for ratio in ratios)
            console.print(f"  over {LIMIT}: {slower} of {len(ratios)} ({100 * slower / len(ratios):.1f}%) {what}")
        for row in rated[:WORST]:
            times = "  ".join(f"{name} {value:.0f}" for name, value in row[kind].items())
            console.print(f"  {row[f'{kind}_ratio']:5.2f}  {row['case']}  us: {times}", markup=False)
    for row in rows:
        if row["error"] is not None:
            console.print(f"  wrong: {row['case']}: {row['error']}", style="red", markup=False)
