"""How measurements are made, with pretended clocks and events: no test here depends on the speed of the machine."""

from __future__ import annotations

import pytest
import torch

from apex._bench import timing

CPU = torch.device("cpu")


class PretendedGpu:
    """A clock that advances only by the pretended cost of the work, in milliseconds."""

    def __init__(self, cost: float) -> None:
        self.cost, self.now, self.log = cost, 0.0, []

    def call(self) -> None:
        self.now += self.cost
        self.log.append("call")

    def event(self, enable_timing: bool) -> PretendedEvent:
        assert enable_timing
        return PretendedEvent(self)

    def empty(self, *size, **options) -> PretendedGpu:
        assert options.pop("device") == "cuda"
        assert size[0] * 4 == timing.CACHE_BYTES
        return self

    def zero_(self) -> None:
        self.now += self.cost  # the clearing takes time too, but not between the events
        self.log.append("clear")


class PretendedEvent:
    def __init__(self, gpu: PretendedGpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.time = self.gpu.now
        self.gpu.log.append("event")

    def elapsed_time(self, end: PretendedEvent) -> float:
        return end.time - self.time


def test_gpu_repetitions_are_cleared_timed_apart_and_within_the_budget(monkeypatch):
    gpu = PretendedGpu(cost=0.5)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: gpu.log.append("wait"))
    monkeypatch.setattr(torch, "empty", gpu.empty)
    samples = timing.device_samples(gpu.call, torch.device("cuda"), timing.FULL)
    # An estimate of 1 ms per call with its clearing: 10 warm-up calls and 40 repetitions.
    assert samples == pytest.approx([500.0] * 40)
    repetition = ["clear", "event", "call", "event"]
    assert gpu.log[-(40 * 4 + 11) :] == ["call"] * 10 + repetition * 40 + ["wait"]


def test_host_time_waits_only_between_batches(monkeypatch):
    gpu = PretendedGpu(cost=0.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: gpu.log.append("wait"))
    assert timing.host_microseconds(gpu.call, torch.device("cuda"), timing.QUICK) >= 0
    assert gpu.log == (["wait"] + ["call"] * timing.HOST_CALLS) * timing.QUICK.host_batches + ["wait"]


def test_gpu_time_is_taken_behind_a_delay_that_covers_the_host(monkeypatch):
    gpu = PretendedGpu(cost=0.5)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: gpu.log.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: gpu.log.append(cycles), raising=False)
    monkeypatch.setattr(torch, "empty", gpu.empty)
    assert timing.gpu_microseconds(gpu.call, torch.device("cuda"), host=150.0) == pytest.approx(500.0)
    delay = timing.CYCLES_PER_MICROSECOND * 400
    assert gpu.log == ["clear", delay, "event", "call", "event", "wait"] * timing.DELAYED_SAMPLES


def test_slow_calls_are_repeated_less_often(monkeypatch):
    gpu = PretendedGpu(cost=0.5)
    clock = iter(range(10_000))
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None, raising=False)
    monkeypatch.setattr(torch, "empty", gpu.empty)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    timing.host_microseconds(gpu.call, torch.device("cuda"), timing.FULL)
    assert gpu.log.count("call") == timing.FEWEST_BATCHES * timing.FEWEST_CALLS
    gpu.log.clear()
    timing.gpu_microseconds(gpu.call, torch.device("cuda"), host=150.0)
    assert gpu.log.count("call") == timing.FEWEST_DELAYED_SAMPLES


def test_the_cpu_has_no_gpu_time():
    assert timing.gpu_microseconds(lambda: None, CPU, None) is None


def test_the_cpu_has_no_host_time():
    assert timing.host_microseconds(lambda: None, CPU, timing.QUICK) is None


@pytest.mark.parametrize("measure", [timing.device_samples, timing.wall_samples])
def test_a_slow_call_is_still_sampled_three_times(measure):
    tiny = timing.Effort(warmup=0, repeat=0, wall_rounds=1, host_batches=1)
    samples = measure(lambda: None, CPU, tiny)
    assert len(samples) == 3
    assert min(samples) >= 0


def test_copy_counts_bytes_read_and_written(monkeypatch):
    monkeypatch.setattr(timing, "CPU_COPY_BYTES", 4000)
    monkeypatch.setattr(timing, "device_samples", lambda call, device, effort: [1.0, 2.0, 30.0])
    assert timing.copy_bandwidth(CPU, timing.QUICK) == pytest.approx(8000 / 2e-6 / 1e9)
