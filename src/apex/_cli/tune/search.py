"""The search: neighbours of a launch rule's answer, compiled side by side, checked, and timed against that answer."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from ..._bench import timing
from ...ops import _library
from ...ops._device import DeviceFacts, facts
from ...ops._tuned import TUNABLE, Changes, Question, noting, trying
from ..build import calls
from .replay import Replay, replay_of

# How much quicker a configuration must be, and what a first look must promise for a second one.
GAIN, PROMISE = 1.03, 1.02
# Turns of the rule's answer and of a candidate, by which it is decided, and calls of each turn.
ROUNDS, CALLS_PER_ROUND = 5, 10
# Neighbours of neighbours that are looked at.
STEPS = 3
MOST_STAGES = 6
TOGETHER = 16  # questions whose candidates are compiled side by side
COMPILING_SECONDS = 60


@dataclass
class Outcome:
    """What became of a question: `config` in place of `instead_of`, or why the rule's answer stands."""

    question: Question
    before: float = 0.0
    after: float = 0.0
    config: dict[str, int] = field(default_factory=dict)
    instead_of: dict[str, int] = field(default_factory=dict)
    tried: int = 0
    reason: str = ""

    def entry(self) -> dict[str, Any]:
        """The line of a table."""
        question = self.question
        found = {"config": self.config, "instead_of": self.instead_of}
        times = {"before_us": round(self.before, 2), "after_us": round(self.after, 2)}
        return {"op": question.op, "dtype": question.dtype, "shape": question.shape, **found, **times}


def neighbours(answer: Any, varied: Sequence[str], device: DeviceFacts) -> list[dict[str, int]]:
    """Changes of one field, or of one and the number of warps together: twice and half, one stage more and less."""
    singles: dict[str, list[int]] = {}
    for name in varied:
        value = getattr(answer, name)
        if name.endswith("stages"):
            singles[name] = [near for near in (value - 1, value + 1) if 1 <= near <= MOST_STAGES]
        else:
            singles[name] = [near for near in (value // 2, 2 * value) if near >= 1]
    warps = singles.get("num_warps", [])
    most = device.max_threads // device.warp_size
    found = [{name: near} for name, nears in singles.items() for near in nears]
    found += [
        {name: near, "num_warps": number}
        for name, nears in singles.items()
        if not name.endswith(("stages", "warps"))
        for near in nears
        for number in warps
        if (near > getattr(answer, name)) == (number > answer.num_warps)
    ]
    return [change for change in found if change.get("num_warps", 1) <= most]


class Search:
    """The search for one question. `samples` gives microseconds of a call."""

    def __init__(self, question: Question, answer: Any, device: torch.device) -> None:
        self.outcome = Outcome(question)
        self.answer, self.device = answer, device
        self.pending: list[dict[str, int]] = []
        self._steps = 0
        self._best: tuple[float, dict[str, int]] | None = None
        self._promising: list[tuple[float, dict[str, int]]] = []
        self._seen: list[Changes] = [{}]
        self.call: Callable[[], Any] | None = None
        self.replay = replay_of(question, device)
        if self.replay is None:
            self.outcome.reason = "no call of `apex build` asks this"
        else:
            self._add(answer)

    def begin(self) -> None:
        """Makes the tensors; nothing is pending where that fails or where the call asks something else."""
        assert self.replay is not None
        try:
            self.call = self._pass_of(self.replay)
            if self.call is None:
                self.outcome.reason = f"{self.replay.name} {self.replay.shape} does not ask this"
        except Exception as error:  # no memory for it, say
            self.outcome.reason = _described(error)
        if self.call is None:
            self.pending = []

    def release(self) -> None:
        """Lets the tensors go: those of one search at a time must fit."""
        if self.replay is not None:
            self.replay.release()

    def _pass_of(self, replay: Replay) -> Callable[[], Any] | None:
        """The pass of the call that asks the question."""
        for call in (replay.forward, replay.backward):
            with noting() as noted:
                call()
            if self.outcome.question.key in noted:
                return call
        return None

    def _add(self, answer: Any) -> None:
        """Neighbours of an answer become candidates."""
        varied = TUNABLE[self.outcome.question.op](answer)
        for change in neighbours(answer, varied, facts(self.device)):
            whole = answer._replace(**change)
            changes = {name: value for name, value in whole._asdict().items() if value != getattr(self.answer, name)}
            if changes not in self._seen:
                self._seen.append(changes)
                self.pending.append(changes)

    def trying(self, changes: Changes) -> Any:
        return trying({self.outcome.question.key: changes})

    def launches(self, changes: Changes, gpu: Any) -> list[Any]:
        """What the call launches with `changes`."""
        from ...ops import _ahead

        assert self.replay is not None
        replay = self.replay
        with self.trying(changes), _ahead.planning(gpu) as launches:
            calls._run_op(replay.op, replay.shape, replay.dtype, torch.device("meta"))
        return launches

    def time_candidates(self, out_of_time: Callable[[], bool]) -> None:
        """A first look at what is pending; the neighbours of the best one are pending next."""
        self._steps += 1
        before = self._microseconds({}) if self.pending else 0.0
        for changes in self.pending:
            if out_of_time():
                break
            self.outcome.tried += 1
            try:
                after = self._microseconds(changes)
            except Exception as error:  # needs more shared memory than there is, or does not compile
                self.outcome.reason = f"{dict(changes)}: {_described(error)}"
                continue
            if after * PROMISE <= before:
                self._promising.append((after / before, changes))
        self.pending = []
        if self._promising and (self._best is None or min(self._promising, key=_ratio) != self._best):
            self._best = min(self._promising, key=_ratio)
            if self._steps < STEPS:
                self._add(self.answer._replace(**self._best[1]))

    def decide(self) -> Outcome:
        """Takes the best candidate that is right, deterministic and quicker in every turn."""
        if self.pending:
            self.outcome.reason = "there was no time for all candidates"
        for _, changes in sorted(self._promising, key=_ratio):
            problem = self._problem(changes) or self._too_slow(changes)
            if not problem:
                self.outcome.config = dict(changes)
                self.outcome.instead_of = {name: getattr(self.answer, name) for name in changes}
                self.outcome.reason = ""
                break
            self.outcome.reason = f"{dict(changes)} {problem}"
        return self.outcome

    def _problem(self, changes: Changes) -> str:
        assert self.replay is not None
        try:
            with self.trying(changes):
                results, again = self.replay.results(), self.replay.results()
            error = self.replay.worst_excess(results)
            # Random numbers may cancel further than the tolerance allows for; then not further than the rule's launch.
            if error > 1:
                with self.trying({}):
                    error /= max(1.0, self.replay.worst_excess(self.replay.results()))
        except Exception as failure:  # the check needs more memory than the call
            return f"cannot be checked: {_described(failure)}"
        if not all(map(torch.equal, results, again)):
            return "gives other bits each time"
        return "" if error <= 1 else f"is wrong: its error is {error:.3g} times the tolerance"

    def _too_slow(self, changes: Changes) -> str:
        befores, afters = [], []
        for _ in range(ROUNDS):
            befores.append(self._microseconds({}))
            afters.append(self._microseconds(changes))
        self.outcome.before, self.outcome.after = median(befores), median(afters)
        if self.outcome.after * GAIN <= self.outcome.before and max(afters) < min(befores):
            return ""
        return f"takes {self.outcome.after:.1f} us instead of {self.outcome.before:.1f}: too little, or noise"

    def _microseconds(self, changes: Changes) -> float:
        assert self.call is not None
        with self.trying(changes):
            self.call()
            return median(samples(self.call, self.device))


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def _ratio(found: tuple[float, Changes]) -> float:
    return found[0]


def samples(call: Callable[[], Any], device: torch.device) -> list[float]:
    """Microseconds of single calls with a cold cache, on a GPU without the host's share."""
    if device.type != "cuda":
        return timing._clock_samples(call, timing.QUICK)
    timing.synchronize(device)
    begin = time.perf_counter()
    call()
    host = 1e6 * (time.perf_counter() - begin)
    return timing.event_samples(call, CALLS_PER_ROUND, timing.delay_cycles(min(host, 2000)))


def search(questions: Sequence[tuple[Question, Any]], device: torch.device, seconds: float) -> Iterator[Outcome]:
    """Searches for each question until the time is over, and yields what became of it."""
    stop = time.perf_counter() + seconds

    def out_of_time() -> bool:
        return time.perf_counter() > stop

    for first in range(0, len(questions), TOGETHER):
        if out_of_time():
            return
        with _library.implementation("triton"):
            searches = [Search(*each, device) for each in questions[first : first + TOGETHER]]
            while any(each.pending for each in searches) and not out_of_time():
                _compile([each for each in searches if each.pending], device, stop)
                for each in searches:
                    if each.pending and not out_of_time():
                        each.begin()
                        each.time_candidates(out_of_time)
                        each.release()
            for each in searches:
                yield each.decide()
                each.release()


# Launches to compile, which worker processes, being forks, find by number.
_launches: list[Any] = []


def _compile(searches: Sequence[Search], device: torch.device, stop: float) -> None:
    """Compiles the candidates into Triton's cache in many processes; what fails there fails again, with its reason."""
    if device.type != "cuda":
        return
    from ...ops import _ahead

    (gpu,) = _ahead.gpu_here().values()
    planned: dict[Any, Any] = {}
    for each in searches:
        for changes in ({}, *each.pending):
            try:
                planned |= {_ahead.program_key(launch): launch for launch in each.launches(changes, gpu)}
            except Exception:  # the same error is reported when the candidate is timed
                continue
    _launches[:] = planned.values()
    _ahead.hash_triton()
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(min(os.cpu_count() or 1, max(1, len(_launches))), context)
    futures = [pool.submit(_compile_launch, number, gpu) for number in range(len(_launches))]
    wait(futures, timeout=max(0.0, min(COMPILING_SECONDS, stop - time.perf_counter())))
    workers = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.terminate()


def _compile_launch(number: int, gpu: Any) -> None:
    from ...ops import _ahead

    _ahead.compile_launch(_launches[number], gpu)
