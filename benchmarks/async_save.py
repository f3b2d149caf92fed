"""Training steps of a GPT of 1.3 billion parameters while its checkpoint is saved asynchronously.

    python benchmarks/async_save.py --folder /dev/shm/async
    python benchmarks/async_save.py --tiny --device cpu  # to try the script

24 layers of 2048, 50,304 words, 16 sequences of 1024 tokens in bfloat16, FusedAdam with float32 master weights: 14
bytes of state for each parameter. A step's time is the time between the events at the ends of two steps. For each way
of staging a save is started between two steps of a loop that never waits for the device. "first" is the step right
after the call, "copying" the longest step until the host has a copy, "writing" the median of some steps after it,
"call" the host's time in the call. "forward and backward" is the time from a step's beginning to its optimizer, in the
steps of "step".

"allowed" is the bar for the first step: 1.1 steps with staging on the device; with staging on the host one step, and
the time by which the copy ("copy during the step") is longer than the forward and the backward pass. "quiet copy" is
the time of the copy on a quiet device, and "copy" the time by the bandwidth; beside a training step the copy takes
longer. "before the copy" is the time from the first step's beginning to the copy's, which with staging on the device is
that of the clones; "first passes" are the forward and the backward pass beside the copy; "after the copy" is the time
from the copy's end to the step's, which with staging on the host is the optimizer's.

These saves go to a folder that cannot be made, so that their writer is free at once. The last save, "complete", is
written; if it is not complete after `--seconds`, the writer is stopped and "steps" is the number of steps until then.
Every figure is printed as a line of JSON, and is in the file of results, when it is known.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from step_models import GPT

from apex import checkpoint, graphs
from apex._bench.environment import describe, device_name, device_stem
from apex.checkpoint import _background
from apex.ops import _staging
from apex.ops._device import on_stream
from apex.optimizers import FusedAdam

RESULTS = Path(__file__).parent / "results"
SIZES = {"layers": 24, "hidden": 2048, "words": 50304, "sequence": 1024, "batch": 16}
TINY = {"layers": 2, "hidden": 64, "words": 128, "sequence": 16, "batch": 2}


class Clock:
    """The times at which work that was queued is done: CUDA events, or the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"

    def now(self) -> Any:
        if not self._events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        if not self._events:
            return 1e3 * (end - start)
        end.synchronize()
        return start.elapsed_time(end)


class Run:
    """A training run: its step, its state and the times of its steps."""

    def __init__(self, sizes: dict[str, int], device: torch.device, capture: bool) -> None:
        torch.manual_seed(0)
        self.clock, self.device = Clock(device), device
        with torch.device(device):
            network = GPT(sizes["layers"], sizes["hidden"], sizes["words"], sizes["sequence"], True, tied=True)
            words = torch.randint(sizes["words"], (sizes["batch"], sizes["sequence"] + 1))
        self.network = network.bfloat16()
        self.optimizer = FusedAdam(self.network.parameters(), lr=1e-4, master_weights=True)
        self.words, self.targets = words[:, :-1].contiguous(), words[:, 1:].contiguous()
        self.step = graphs.capture(self._step) if capture else self._step
        # The ends of the backward passes. Captured steps record no events.
        self._is_captured, self.backward_ends = capture, list[Any]()

    def _step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.network(self.words, self.targets)
        loss.backward()
        if not self._is_captured:
            self.backward_ends.append(self.clock.now())
        self.optimizer.step()
        return loss.detach()

    def state(self) -> dict[str, Any]:
        return {"model": self.network.state_dict(), "optimizer": self.optimizer.state_dict()["state"]}

    def times(self, steps: int) -> tuple[list[float], list[float]]:
        """Return the times of some steps, and of their forward and backward passes if they are eager, in ms."""
        self.backward_ends.clear()
        ends = [self.clock.now()]
        for _ in range(steps):
            self.step()
            ends.append(self.clock.now())
        passes = zip(ends, self.backward_ends, strict=False)
        whole = itertools.pairwise(ends)
        return [self.clock.between(*pair) for pair in whole], [self.clock.between(*pair) for pair in passes]

    def quiet_copy(self, path: Path) -> float:
        """Return the time of the copies of a save while nothing else runs."""
        torch.cuda.synchronize()
        checkpoint.save_sharded(self.state(), path, use_async=True, staging="host")
        checkpoint.wait()
        return self.clock.between(*COPY_TIMES[-1])

    def during_save(self, path: Path, staging: str, until: float) -> dict[str, Any]:
        """Save while steps go on, until the save is done, and at most to the time `until`."""
        for _ in range(3):
            self.step()
        self.backward_ends.clear()
        ends, is_copied = [self.clock.now()], []
        start = time.perf_counter()
        checkpoint.save_sharded(self.state(), path, use_async=True, staging=staging)
        call = 1e3 * (time.perf_counter() - start)
        saving: Any = _background._saving
        while len(is_copied) < 6 or not (saving.done() or time.perf_counter() > until):
            self.step()
            ends.append(self.clock.now())
            if len(ends) > 3 and self.device.type == "cuda":  # as a loop that reads its losses: two steps ahead
                ends[-3].synchronize()
            is_copied.append(all(event.query() for _, event in COPIES[-1]._events))
        times = [self.clock.between(*pair) for pair in itertools.pairwise(ends)]
        copying = is_copied.index(True) + 1 if True in is_copied else len(times)
        found = {
            "first": times[0],
            "copying": max(times[:copying]),
            "writing": statistics.median(times[copying:] or times[-1:]),
            "call": call,
        }
        if self.backward_ends:
            found["first passes"] = self.clock.between(ends[0], self.backward_ends[0])
        if self.device.type == "cuda":
            found["before the copy"] = self.clock.between(ends[0], COPY_TIMES[-1][0])
            found["copy during the step"] = self.clock.between(*COPY_TIMES[-1])
            found["after the copy"] = self.clock.between(COPY_TIMES[-1][1], ends[1])
        result: dict[str, Any] = {name: round(value, 2) for name, value in found.items()} | {"steps": len(times)}
        if saving.done():
            checkpoint.wait()
            result["seconds"] = round(time.perf_counter() - start, 2)
        return result


# The copies of each save, for the end of the copying, and the events at their beginning and end.
COPIES: list[Any] = []
COPY_TIMES: list[tuple[Any, Any]] = []


def watch_copies() -> None:
    """Keep the copies of each save, and events before the first and after the last piece on the stream of copies."""
    begin = _staging.Copies.__init__
    times: list[Any] = []

    def init(self: Any, *args: Any) -> None:
        times.clear()
        begin(self, *args)
        COPIES.append(self)
        if times:
            COPY_TIMES.append((times[0], times[-1]))

    @contextlib.contextmanager
    def timed_stream(stream: Any) -> Iterator[None]:
        clock = Clock(torch.device("cuda"))
        with on_stream(stream):
            times.append(clock.now())
            yield
            times.append(clock.now())

    _staging.Copies.__init__ = init  # type: ignore[method-assign]
    _staging.on_stream = timed_stream  # type: ignore[attr-defined]


def bandwidth(device: torch.device, size: int = 1 << 30) -> float:
    """Return GB/s of a copy from the device to pinned memory."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    clock, times = Clock(device), []
    for _ in range(4):
        start = clock.now()
        target.copy_(source, non_blocking=True)
        times.append(clock.between(start, clock.now()))
    return size / min(times) / 1e6


class Preparation:
    """The writer process and pinned memory, which are made in a thread while the model is built."""

    def __init__(self, folder: Path, size: int, pinned: bool) -> None:
        self._folder, self._size, self._pinned = folder, size, pinned
        self.seconds: dict[str, float] = {}
        start = time.perf_counter()
        checkpoint.save_sharded({"x": torch.ones(1, device="cpu")}, folder / "small", use_async=True)
        self._thread = threading.Thread(target=self._allocate, args=(start,))
        self._thread.start()

    def _allocate(self, start: float) -> None:
        allocating = time.perf_counter()
        self._buffer = _staging.HostBuffer(self._size, self._pinned)
        self.seconds["allocation"] = round(time.perf_counter() - allocating, 2)
        saving: Any = _background._saving
        saving.exception()
        self.seconds["first small save"] = round(time.perf_counter() - start, 2)

    def finish(self) -> dict[str, float]:
        """Give the writer its memory; return the seconds that both took."""
        self._thread.join()
        checkpoint.wait()
        writer: Any = _background._writer_of_process
        writer._buffer.close()
        writer._buffer, writer._is_new_buffer = self._buffer, True
        return self.seconds


@contextlib.contextmanager
def without_errors() -> Iterator[None]:
    """Ignore the errors of saves, which would end the writer and free its memory."""
    raising = _background._raise_everywhere
    _background._raise_everywhere = lambda *_: None
    try:
        yield
    finally:
        _background._raise_everywhere = raising


class Record:
    """Figures of the run so far: each is printed as a line of JSON, and the file is written anew."""

    def __init__(self, path: Path | None, content: dict[str, Any]) -> None:
        self.path, self.content = path, content

    def add(self, **figures: Any) -> None:
        """Add figures, which replace older ones of the same name."""
        self.content |= figures
        print(json.dumps(figures), flush=True)
        if self.path is not None:
            self.path.write_text(json.dumps(self.content, indent=2) + "\n")


def size_of(sizes: dict[str, int]) -> int:
    """Return at least the bytes of the state: weights in bfloat16, master weights and two moments in float32."""
    layers, hidden = sizes["layers"], sizes["hidden"]
    parameters = layers * (12 * hidden**2 + 13 * hidden) + (sizes["words"] + sizes["sequence"] + 2) * hidden
    return int(1.05 * 14 * parameters) + (16 << 20)


def measure(
    sizes: dict[str, int], device: torch.device, folder: Path, capture: bool, end: float, record: Record
) -> None:
    """Record the times of steps without a save, and of steps during saves."""
    preparation = Preparation(folder, size_of(sizes), device.type == "cuda")
    run = Run(sizes, device, capture)
    run.times(5)
    record.add(seconds=preparation.finish())
    step, passes = (statistics.median(each or [0.0]) for each in run.times(10))
    count = sum(tensor.nbytes for state in run.state()["optimizer"].values() for tensor in state.values()
                if isinstance(tensor, torch.Tensor))  # fmt: skip
    count += sum(tensor.nbytes for tensor in run.network.parameters())
    record.add(**{"state in GB": round(count / 1e9, 2), "step": round(step, 2)})
    if passes:
        record.add(**{"forward and backward": round(passes, 2)})
    nowhere = folder / "small" / "manifest.json" / "step"
    if device.type == "cuda":
        speed = bandwidth(device)
        with without_errors():
            quiet = run.quiet_copy(nowhere)
        record.add(**{"GB/s": round(speed, 1), "copy": round(count / speed / 1e6, 1), "quiet copy": round(quiet, 1)})
    # The first save with clones on the device also allocates their memory, which PyTorch keeps for the second.
    for name, staging in (("first on the device", "device"), ("on the device", "device"), ("on the host", "host")):
        with without_errors():
            found = run.during_save(nowhere, staging, end)
        if device.type == "cuda" and not capture:
            longer = max(0.0, found["copy during the step"] - passes)
            allowed = 1.1 * step if staging == "device" else step + longer
            found |= {"allowed": round(allowed, 2), "within": found["first"] <= allowed}
        found["of a step"] = round(found["first"] / step, 3)
        record.add(**{f"staging {name}": found})
    if device.type == "cuda":
        record.add(**{"peak memory in GB": round(torch.cuda.max_memory_allocated() / 1e9, 1)})
    record.add(complete=run.during_save(folder / "step", "host", end))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument(
        "--folder", type=Path, default=Path("async_save"), help="where checkpoints go; removed at the end"
    )
    parser.add_argument("--capture", action="store_true", help="measure captured steps instead")
    parser.add_argument("--seconds", type=float, default=50, help="when to stop the last save")
    parser.add_argument("--output", type=Path, help="a folder for the results; benchmarks/results by default")
    args = parser.parse_args()
    end = time.perf_counter() + args.seconds
    device = torch.device(args.device)
    watch_copies()
    path = None
    if not args.tiny or args.output:
        ending = "captured-async-save.json" if args.capture else "async-save.json"
        path = (args.output or RESULTS) / f"{device_stem(device_name(device))}-{ending}"
    sizes = TINY if args.tiny else SIZES
    record = Record(path, {**describe(device), "sizes": sizes, "folder": os.fspath(args.folder)})
    try:
        measure(sizes, device, args.folder, args.capture, end, record)
    finally:
        writer: Any = _background._writer_of_process
        if writer is not None and _background.is_busy():
            writer._process.kill()
            with contextlib.suppress(RuntimeError):
                checkpoint.wait()
        shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
