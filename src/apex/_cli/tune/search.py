"""The search for quicker launch configurations, starting from the default, which a launch rule returns.

Neighbours of the default are compiled side by side, checked, and timed against it. A question is a launch whose
configuration is asked for; the rule's answer is the default.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from statistics import median
from typing import Any

import torch

from ..._bench import timing
from ...ops import _library
from ...ops._device import DeviceFacts, facts
from ...ops._tuned import TUNABLE, Changes, Question, noting, trying
from ..build.calls import _run_op
from .replay import replay_of

# The speed-up that a configuration must have, and the first measured speed-up for which it is timed again.
GAIN, PROMISE = 1.03, 1.02
# Turns that time the default and a candidate to decide, and calls in each turn.
ROUNDS, CALLS_PER_ROUND = 5, 10
# How many times the neighbours of the best candidate are tried.
STEPS = 3
MOST_STAGES = 6
TOGETHER = 16  # questions whose candidates are compiled side by side
COMPILING_SECONDS = 60


def neighbours(answer: Any, varied: Sequence[str], device: DeviceFacts) -> list[dict[str, int]]:
    """Return the changes to try: one field doubled, halved or one stage more or less, alone or with the warps."""
    near: dict[str, list[int]] = {}
    for name in varied:
        value = getattr(answer, name)
        around = (value - 1, value + 1) if name.endswith("stages") else (value // 2, 2 * value)
        most = {"num_warps": device.max_threads // device.warp_size, "num_stages": MOST_STAGES, "stages": MOST_STAGES}
        near[name] = [each for each in around if 1 <= each <= most.get(name, each)]
    changes = [{name: each} for name in near for each in near[name]]
    for name in near:
        if not name.endswith(("stages", "warps")):
            pairs = [(each, warps) for each in near[name] for warps in near.get("num_warps", [])]
            same = [pair for pair in pairs if (pair[0] > getattr(answer, name)) == (pair[1] > answer.num_warps)]
            changes += [{name: each, "num_warps": warps} for each, warps in same]
    return changes


class Search:
    """The search for one launch. `config` is quicker than `instead_of`, or `reason` says why nothing was found."""

    def __init__(self, question: Question, answer: Any, device: torch.device) -> None:
        self.question, self.answer, self.device = question, answer, device
        self.config: dict[str, int] = {}
        self.instead_of: dict[str, int] = {}
        self.before = self.after = 0.0
        self.tried = self._steps = 0
        self.reason = ""
        self.pending: list[Changes] = []
        self._seen: list[Changes] = [{}]
        self._promising: list[tuple[float, Changes]] = []
        self.call: Callable[[], Any] | None = None
        self.replay = replay_of(question, device)
        if self.replay is None:
            self.reason = "no call of `apex build` asks this"
        else:
            self._add_neighbours(answer)

    def entry(self) -> dict[str, Any]:
        """Return the result as an entry of a table."""
        question = {"op": self.question.op, "dtype": self.question.dtype, "shape": self.question.shape}
        times = {"before_us": round(self.before, 2), "after_us": round(self.after, 2)}
        return {**question, "config": self.config, "instead_of": self.instead_of, **times}

    def _add_neighbours(self, answer: Any) -> None:
        for change in neighbours(answer, TUNABLE[self.question.op](answer), facts(self.device)):
            whole = answer._replace(**change)._asdict()
            changes = {name: value for name, value in whole.items() if value != getattr(self.answer, name)}
            if changes not in self._seen:
                self._seen.append(changes)
                self.pending.append(changes)

    def begin(self) -> None:
        """Find the pass that makes the launch; drop all candidates if neither does, or if memory does not suffice."""
        try:
            for call in (self.replay.forward, self.replay.backward):  # type: ignore[union-attr]
                with noting() as noted:
                    call()
                if self.question.key in noted:
                    self.call = call
                    return
            self.reason = f"{self.replay.name} {self.replay.shape} does not ask this"  # type: ignore[union-attr]
        except Exception as error:
            self.reason = _described(error)
        self.pending = []

    def trying(self, changes: Changes) -> Any:
        """Return a context in which the launch has these changes to its default configuration."""
        return trying({self.question.key: changes})

    def time_candidates(self, out_of_time: Callable[[], bool]) -> None:
        """Time the pending candidates once; the neighbours of the best one become pending."""
        candidates, self.pending = self.pending, []
        before = self.microseconds({}) if candidates else 0.0
        for changes in candidates:
            if out_of_time():
                self.reason = "there was no time for all candidates"
                break
            self.tried += 1
            try:
                after = self.microseconds(changes)
            except Exception as error:  # needs more shared memory than there is, or does not compile
                self.reason = f"{changes}: {_described(error)}"
                continue
            if after * PROMISE <= before:
                self._promising.append((after / before, changes))
        self._promising.sort(key=lambda found: found[0])
        self._steps += 1
        if self._promising and self._promising[0][1] in candidates and self._steps < STEPS:
            self._add_neighbours(self.answer._replace(**self._promising[0][1]))

    def decide(self) -> Search:
        """Adopt the best candidate that is right, deterministic and quicker in every turn; return the search."""
        for _, changes in self._promising:
            problem = self._problem(changes) or self._too_slow(changes)
            if not problem:
                self.config, self.reason = dict(changes), ""
                self.instead_of = {name: getattr(self.answer, name) for name in changes}
                break
            self.reason = f"{changes} {problem}"
        return self

    def _problem(self, changes: Changes) -> str:
        replay: Any = self.replay
        try:
            with self.trying(changes):
                results, again = replay.call.results(), replay.call.results()
            error = replay.call.worst_excess(results)
            # Random sums may cancel to less than the tolerance assumes: allow the error of the rule's own launch, too.
            if error > 1:
                with self.trying({}):
                    error /= max(1.0, replay.call.worst_excess(replay.call.results()))
        except Exception as failure:  # the check needs more memory than the call
            return f"cannot be checked: {_described(failure)}"
        if not all(map(torch.equal, results, again)):
            return "gives other bits each time"
        return "" if error <= 1 else f"is wrong: its error is {error:.3g} times the tolerance"

    def _too_slow(self, changes: Changes) -> str:
        turns = [(self.microseconds({}), self.microseconds(changes)) for _ in range(ROUNDS)]
        befores, afters = zip(*turns, strict=True)
        self.before, self.after = median(befores), median(afters)
        if self.after * GAIN <= self.before and max(afters) < min(befores):
            return ""
        return f"takes {self.after:.1f} us instead of {self.before:.1f}: too little, or noise"

    def microseconds(self, changes: Changes) -> float:
        """Return the median time of the pass with these changes."""
        assert self.call is not None
        with self.trying(changes):
            self.call()
            return median(samples(self.call, self.device))


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def samples(call: Callable[[], Any], device: torch.device) -> list[float]:
    """Return the times of single calls with a cold cache, in microseconds; on a GPU, without the host's time."""
    if device.type != "cuda":
        return timing.device_samples(call, device, timing.QUICK)
    timing.synchronize(device)
    begin = time.perf_counter()
    call()
    host = 1e6 * (time.perf_counter() - begin)
    return timing.event_samples(call, CALLS_PER_ROUND, timing.delay_cycles(min(host, 2000)))


def search(questions: Sequence[tuple[Question, Any]], device: torch.device, seconds: float) -> Iterator[Search]:
    """Search for each question until the time is over; yield the searches that were finished."""
    stop = time.perf_counter() + seconds

    def out_of_time() -> bool:
        return time.perf_counter() > stop

    for first in range(0, len(questions), TOGETHER):
        if out_of_time():
            return
        with _library.implementation("triton"):
            searches = [Search(*each, device) for each in questions[first : first + TOGETHER]]
            while (pending := [each for each in searches if each.pending]) and not out_of_time():
                _compile(pending, device, stop)
                for each in pending:
                    if not out_of_time():
                        each.begin()
                        each.time_candidates(out_of_time)
                        each.replay.release()  # type: ignore[union-attr]
            for each in searches:
                yield each.decide()
                if each.replay is not None:
                    each.replay.release()


# Launches to compile. Worker processes are forks, so a number tells them which launch is meant.
_launches: list[Any] = []


def _compile(searches: Sequence[Search], device: torch.device, stop: float) -> None:
    """Compile the candidates into Triton's cache in many processes. Errors are reported when a candidate is timed."""
    if device.type != "cuda":
        return
    from ...ops import _compile_ahead

    (gpu,) = _compile_ahead.gpu_here().values()
    planned: dict[Any, Any] = {}
    for each in searches:
        replay: Any = each.replay
        for changes in ({}, *each.pending):
            try:
                with each.trying(changes), _compile_ahead.planning(gpu) as launches:
                    _run_op(replay.op, replay.shape, replay.dtype, torch.device("meta"))
            except Exception:  # the same error is reported when the candidate is timed
                continue
            planned |= {_compile_ahead.program_key(launch): launch for launch in launches}
    _launches[:] = planned.values()
    _compile_ahead.hash_triton()
    workers = min(os.cpu_count() or 1, max(1, len(_launches)))
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"))
    futures = [pool.submit(_compile_launch, number, gpu) for number in range(len(_launches))]
    wait(futures, timeout=max(0.0, min(COMPILING_SECONDS, stop - time.perf_counter())))
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()


def _compile_launch(number: int, gpu: Any) -> None:
    from ...ops import _compile_ahead

    _compile_ahead.compile_launch(_launches[number], gpu)
