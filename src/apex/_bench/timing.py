"""The time of a call in microseconds: on the device, by the wall clock, and on the host.

On a GPU the device time is the median over repetitions. Each is measured between two events and after a 256 MB buffer
was zeroed, so that the call finds a cold L2 cache. The number of repetitions follows from an estimate and a time
budget. If a call keeps the host busy for longer than the clearing takes, its time includes gaps; the GPU time is
therefore measured once more, behind a delay on the GPU during which the host queues the whole call.
While a GPU is timed the process stays on one core: see cores.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

CACHE_BYTES = 256 * 1024 * 1024  # more than the L2 cache of any GPU
ESTIMATE_CALLS = 5
GPU_COPY_BYTES = 1 << 30
CPU_COPY_BYTES = 256 << 20
HOST_CALLS = 20  # per batch: a GPU's queue holds about a thousand launches, and a full queue would stall the host
WALL_BATCH_SECONDS = 5e-3
MOST_SAMPLES = 10_000
DELAYED_SAMPLES = 50
# Repetitions of slow calls end after this time, but at least a few are made.
MOST_SECONDS = 0.5
FEWEST_BATCHES = 2
FEWEST_CALLS = 3
FEWEST_DELAYED_SAMPLES = 5
CYCLES_PER_MICROSECOND = 2000  # GPU clock, chosen so that a delay is too long rather than too short


@dataclass(frozen=True)
class Effort:
    """The time a measurement may take: milliseconds per warm-up and per round, and numbers of rounds and batches."""

    warmup: float
    repeat: float
    wall_rounds: int
    host_batches: int
    device_rounds: int = 1
    one_core: bool = True  # while a GPU is timed


FULL = Effort(warmup=10, repeat=40, wall_rounds=6, host_batches=10, device_rounds=2)
QUICK = Effort(warmup=2, repeat=10, wall_rounds=1, host_batches=3)


def synchronize(device: torch.device) -> None:
    """Wait for the device; do nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_samples(call: Callable[[], object], device: torch.device, effort: Effort) -> list[float]:
    """Return microseconds of single calls on the device, after a warm-up."""
    return _event_samples(call, effort) if device.type == "cuda" else _clock_samples(call, effort)


def _event_samples(call: Callable[[], object], effort: Effort) -> list[float]:
    cache = torch.empty(CACHE_BYTES // 4, dtype=torch.int32, device="cuda")
    call()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(ESTIMATE_CALLS):
        cache.zero_()
        call()
    end.record()
    torch.cuda.synchronize()
    estimate = max(start.elapsed_time(end) / ESTIMATE_CALLS, 1e-4)  # milliseconds

    for _ in range(max(1, int(effort.warmup / estimate))):
        call()
    return event_samples(call, min(MOST_SAMPLES, max(1, int(effort.repeat / estimate))))


def event_samples(call: Callable[[], object], calls: int, delay: int = 0) -> list[float]:
    """Return microseconds of `calls` calls, each between two events with a cold cache; `delay` cycles hide the host."""
    cache = torch.empty(CACHE_BYTES // 4, dtype=torch.int32, device="cuda")
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(calls)]
    for start, end in events:
        cache.zero_()
        if delay:
            torch.cuda._sleep(delay)
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) for start, end in events]


def _clock_samples(call: Callable[[], object], effort: Effort) -> list[float]:
    """Time single calls by the wall clock until the budget is spent, at least three."""
    _repeat_for(call, effort.warmup)
    samples: list[float] = []
    stop = time.perf_counter() + effort.repeat / 1e3
    while len(samples) < 3 or (time.perf_counter() < stop and len(samples) < MOST_SAMPLES):
        begin = time.perf_counter()
        call()
        samples.append(1e6 * (time.perf_counter() - begin))
    return samples


def wall_samples(call: Callable[[], object], device: torch.device, effort: Effort) -> list[float]:
    """Return microseconds per iteration of a loop that waits for the device only at its end, one sample per loop."""
    _repeat_for(call, effort.warmup)
    synchronize(device)
    begin = time.perf_counter()
    calls = 0
    while calls < ESTIMATE_CALLS and (not calls or time.perf_counter() - begin < WALL_BATCH_SECONDS):
        call()
        calls += 1
    synchronize(device)
    estimate = (time.perf_counter() - begin) / calls
    iterations = min(200, max(1, int(WALL_BATCH_SECONDS / estimate)))
    samples: list[float] = []
    stop = time.perf_counter() + effort.repeat / 1e3
    while len(samples) < 3 or time.perf_counter() < stop:
        begin = time.perf_counter()
        for _ in range(iterations):
            call()
        synchronize(device)
        samples.append(1e6 * (time.perf_counter() - begin) / iterations)
    return samples


def host_microseconds(call: Callable[[], object], device: torch.device, effort: Effort) -> float | None:
    """Return the time the Python thread is busy per call while the GPU's work is queued; None on the CPU."""
    if device.type == "cpu":
        return None
    samples: list[float] = []
    stop = time.perf_counter() + MOST_SECONDS
    for _ in range(effort.host_batches):
        if len(samples) >= FEWEST_BATCHES and time.perf_counter() > stop:
            break
        synchronize(device)
        begin = now = time.perf_counter()
        calls = 0
        while calls < HOST_CALLS and (calls < FEWEST_CALLS or now - begin < MOST_SECONDS / FEWEST_BATCHES):
            call()
            calls += 1
            now = time.perf_counter()
        samples.append(1e6 * (now - begin) / calls)
    synchronize(device)
    return median(samples)


def gpu_microseconds(call: Callable[[], object], device: torch.device, host: float | None) -> float | None:
    """Return the time on the GPU alone for a call of `host` microseconds on the host; None without a GPU."""
    if device.type != "cuda" or host is None:
        return None
    delay = delay_cycles(host)
    samples: list[float] = []
    stop = time.perf_counter() + MOST_SECONDS
    for _ in range(DELAYED_SAMPLES):
        if len(samples) >= FEWEST_DELAYED_SAMPLES and time.perf_counter() > stop:
            break
        samples += event_samples(call, 1, delay)
    return median(samples)


def delay_cycles(host: float) -> int:
    """Return a delay in GPU cycles that is longer than a call that keeps the host busy for `host` microseconds."""
    return int(CYCLES_PER_MICROSECOND * (2 * host + 100))


def copy_bandwidth(device: torch.device, effort: Effort) -> float:
    """Return the GB/s of a copy within device memory, counting the bytes read and the bytes written."""
    size = CPU_COPY_BYTES if device.type == "cpu" else GPU_COPY_BYTES
    source = torch.zeros(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * size / median(device_samples(lambda: target.copy_(source), device, effort)) / 1e3


def _repeat_for(call: Callable[[], object], milliseconds: float) -> None:
    """Repeat a call until the time is over, at least once."""
    stop = time.perf_counter() + milliseconds / 1e3
    call()
    while time.perf_counter() < stop:
        call()
