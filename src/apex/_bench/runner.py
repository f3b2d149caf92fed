"""Measures one case at a time: checks every implementation first, then times the correct ones."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch

from . import cores, timing
from .check import mean_excess, worst_excess
from .registry import OURS, Call, Case, Expected
from .results import CaseResult, Measurement


def run_case(
    case: Case,
    family: str,
    device: torch.device,
    effort: timing.Effort,
    copy_bandwidth: float,
    recorded: dict[str, Measurement] | None = None,
) -> CaseResult:
    """Check and time every implementation of `case`; add the `recorded` measurements."""
    # Exempt older objects, such as a compiler's million, so that collections between turns do not traverse them.
    gc.collect()
    gc.freeze()
    try:
        measurements = _measure(case, device, effort)
    except Exception as error:  # the case itself could not be built, for example for lack of memory
        measurements = {OURS: Measurement(OURS, "failed", error=_describe(error))}
    finally:
        gc.unfreeze()
    _release(device)
    return CaseResult(
        case.name,
        family,
        case.timing,
        case.bytes_moved,
        copy_bandwidth,
        {**measurements, **(recorded or {})},
        case.note,
    )


def _measure(case: Case, device: torch.device, effort: timing.Effort) -> dict[str, Measurement]:
    prepared = case.make(device)
    measurements: dict[str, Measurement] = {}
    makers: dict[str, Callable[[], Call]] = {}
    for name, prepare in prepared.implementations.items():
        try:
            call = prepare()
            measurements[name] = _check(name, call, prepared.expected_of.get(name, prepared.expected))
        except Exception as error:  # one implementation's failure is a result, not the end of the run
            measurements[name] = Measurement(name, "failed", error=_describe(error))
        else:
            if measurements[name].status == "ok":
                again: Callable[[], Call] = lambda call=call: call  # type: ignore[misc]  # noqa: E731
                makers[name] = prepared.timed[name] if prepared.timed is not None else again
            del call
    prepared.expected, prepared.expected_of = (), {}
    _release(device)
    on_one_core = effort.one_core and device.type == "cuda" and cores.may_be_chosen()
    with cores.one_core() if on_one_core else contextlib.nullcontext():
        outcomes = _time(case, makers, device, effort)
    for name, outcome in outcomes.items():
        if isinstance(outcome, Exception):
            measurements[name] = Measurement(name, "failed", error=_describe(outcome))
        else:
            microseconds, host, gpu = outcome
            measurements[name] = replace(
                measurements[name], microseconds=microseconds, host_microseconds=host, gpu_microseconds=gpu
            )
    return measurements


def _check(name: str, call: Call, expected: Sequence[Expected]) -> Measurement:
    """Return a measurement without a time: "ok" or "wrong"."""
    actual = call()
    worst = worst_excess(actual, expected)
    judged = worst if name == OURS else min(worst, mean_excess(actual, expected))
    known = worst if math.isfinite(worst) else None
    if judged <= 1:
        return Measurement(name, "ok", worst_error=known)
    reason = "results are NaN or have the wrong shape" if known is None else f"error is {worst:.3g} times the tolerance"
    return Measurement(name, "wrong", worst_error=known, error=reason)


def _time(
    case: Case, makers: dict[str, Callable[[], Call]], device: torch.device, effort: timing.Effort
) -> dict[str, tuple[float, float | None, float | None] | Exception]:
    """Return median, host time and GPU time in microseconds per implementation, or the exception it raised.

    Implementations are measured in turns, so that a drift of the machine affects all alike. The time on a device is the
    smallest median of a turn: after the check in double precision, a GPU may be 10% slower for the whole first turn.
    A call is made when its turn comes and dropped after it, because the next one may need its memory. Being made again
    for every round also averages over memory addresses, which affect times by 15% on a CPU.
    """
    wall = case.timing == "wall"
    measure = timing.wall_samples if wall else timing.device_samples
    samples: dict[str, list[list[float]]] = {name: [] for name in makers}
    host: dict[str, float | None] = {}
    gpu: dict[str, float | None] = {}
    errors: dict[str, Exception] = {}
    for _ in range(effort.wall_rounds if wall else effort.device_rounds):
        for name, make in makers.items():
            if name in errors:
                continue
            try:
                call = make()
                samples[name].append(measure(call, device, effort))
                if name not in host:
                    host[name] = timing.host_microseconds(call, device, effort)
                    gpu[name] = timing.gpu_microseconds(call, device, host[name])
            except Exception as error:
                errors[name] = error.with_traceback(None)  # a traceback's frames would keep tensors alive
            call = None  # type: ignore[assignment]
            _release(device)
    times = {
        name: median(itertools.chain(*turns)) if wall else min(map(median, turns))
        for name, turns in samples.items()
        if name not in errors
    }
    return {name: errors.get(name) or (times[name], host[name], gpu[name]) for name in makers}


def _release(device: torch.device) -> None:
    """Free unreferenced memory, so that cases do not affect each other."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _describe(error: Exception) -> str:
    """Return the error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
