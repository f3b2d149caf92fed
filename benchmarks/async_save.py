"""Training steps of a GPT of 1.3 billion parameters while its checkpoint is saved asynchronously.

    python benchmarks/async_save.py --folder /dev/shm/async
    python benchmarks/async_save.py --tiny --device cpu  # to try the script

24 layers of 2048, 50,304 words, 16 sequences of 1024 tokens in bfloat16, FusedAdam with float32 master weights: 14
bytes of state for each parameter. A step's time is the time between the events at the ends of two steps. For each way
of staging a save is started between two steps of a loop that never waits for the device. "first" is the step right
after the call, "copying" the longest step until the host has a copy, "writing" the median of the steps until the
checkpoint is complete, "call" the host's time in the call. "allowed" is the bar for the first step: 1.1 steps with
staging on the device; with staging on the host one step, and the time by which the copy is longer than the forward and
the backward pass.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
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

    def _step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.passes()
        self.optimizer.step()
        return loss.detach()

    def passes(self) -> torch.Tensor:
        loss = self.network(self.words, self.targets)
        loss.backward()
        return loss

    def state(self) -> dict[str, Any]:
        return {"model": self.network.state_dict(), "optimizer": self.optimizer.state_dict()["state"]}

    def times(self, steps: int, function: Any = None) -> list[float]:
        """Return the times of some steps in milliseconds."""
        ends = [self.clock.now()]
        for _ in range(steps):
            (function or self.step)()
            ends.append(self.clock.now())
        return [self.clock.between(*pair) for pair in itertools.pairwise(ends)]

    def during_save(self, path: Path, staging: str, most: int) -> dict[str, Any]:
        """Save while steps go on, until the checkpoint is complete or `most` steps are done."""
        for _ in range(3):
            self.step()
        ends, is_copied = [self.clock.now()], []
        start = time.perf_counter()
        checkpoint.save_sharded(self.state(), path, use_async=True, staging=staging)
        call = 1e3 * (time.perf_counter() - start)
        saving: Any = _background._saving
        while len(is_copied) < 6 or not (saving.done() or len(is_copied) == most):
            self.step()
            ends.append(self.clock.now())
            if len(ends) > 3 and self.device.type == "cuda":  # as a loop that reads its losses: two steps ahead
                ends[-3].synchronize()
            is_copied.append(all(event.query() for _, event in COPIES[-1]._events))
        times = [self.clock.between(*pair) for pair in itertools.pairwise(ends)]
        copying = is_copied.index(True) + 1
        found = {
            "first": times[0],
            "copying": max(times[:copying]),
            "writing": statistics.median(times[copying:] or times[-1:]),
            "call": call,
        }
        checkpoint.wait()
        seconds = round(time.perf_counter() - start, 2)
        return {**{name: round(value, 2) for name, value in found.items()}, "steps": len(times), "seconds": seconds}


# The copies of each save, for the end of the copying.
COPIES: list[Any] = []


def watch_copies() -> None:
    begin = _staging.Copies.__init__

    def init(self: Any, *args: Any) -> None:
        begin(self, *args)
        COPIES.append(self)

    _staging.Copies.__init__ = init  # type: ignore[method-assign]


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


def allocate(folder: Path, size: int) -> dict[str, float]:
    """Start the writer with a small save, and give it memory for the large ones; return the seconds of both."""
    start = time.perf_counter()
    checkpoint.save_sharded({"x": torch.ones(1, device="cpu")}, folder / "small", use_async=True)
    checkpoint.wait()
    started = time.perf_counter()
    writer: Any = _background._writer_of_process
    if writer._buffer.size < size:
        writer._buffer.close()
        writer._buffer = _staging.HostBuffer(int(1.01 * size) + (1 << 20), torch.cuda.is_available())
        writer._is_new_buffer = True
    allocated = time.perf_counter()
    return {"start of the writer in s": round(started - start, 2), "allocation in s": round(allocated - started, 2)}


@contextlib.contextmanager
def without_errors() -> Iterator[None]:
    """Ignore the errors of saves, which would end the writer and free its memory."""
    raising = _background._raise_everywhere
    _background._raise_everywhere = lambda *_: None
    try:
        yield
    finally:
        _background._raise_everywhere = raising


def measure(sizes: dict[str, int], device: torch.device, folder: Path, capture: bool, most: int) -> dict[str, Any]:
    run = Run(sizes, device, capture)
    run.times(5)
    step = statistics.median(run.times(12))
    count = sum(tensor.nbytes for state in run.state()["optimizer"].values() for tensor in state.values()
                if isinstance(tensor, torch.Tensor))  # fmt: skip
    count += sum(tensor.nbytes for tensor in run.network.parameters())
    row: dict[str, Any] = {"state in GB": round(count / 1e9, 2), "step": round(step, 2)}
    if not capture:
        run.optimizer.zero_grad()
        passes = statistics.median(run.times(6, run.passes))
        row["forward and backward"] = round(passes, 2)
    if device.type == "cuda":
        speed = bandwidth(device)
        copy = count / speed / 1e6
        row |= {"GB/s": round(speed, 1), "copy": round(copy, 1)}
    row |= allocate(folder, count)
    print(row, flush=True)
    for staging in ("device", "host"):
        # A complete checkpoint is written once. The other saves copy, and their writer finds no folder to write to.
        complete = staging == "device" and not capture
        with contextlib.nullcontext() if complete else without_errors():
            path = folder / "step" if complete else folder / "small" / "manifest.json" / "step"
            found = run.during_save(path, staging, most)
        if device.type == "cuda" and not capture:
            allowed = 1.1 * step if staging == "device" else step + max(0.0, copy - passes)
            found |= {"allowed": round(allowed, 2), "within": found["first"] <= allowed}
        found["of a step"] = round(found["first"] / step, 3)
        row[f"staging on the {staging}"] = found
        print(staging, found, flush=True)
    if device.type == "cuda":
        row["peak memory in GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument(
        "--folder", type=Path, default=Path("async_save"), help="where checkpoints go; removed at the end"
    )
    parser.add_argument("--capture", action="store_true", help="measure captured steps too")
    parser.add_argument("--most", type=int, default=60, help="steps during a save, at most")
    parser.add_argument("--output", type=Path, help="a folder for the results; benchmarks/results by default")
    args = parser.parse_args()
    device = torch.device(args.device)
    watch_copies()
    rows = {}
    try:
        for name in ("eager", *(["captured"] if args.capture else [])):
            rows[name] = measure(TINY if args.tiny else SIZES, device, args.folder, name == "captured", args.most)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)
    sizes = "tiny" if args.tiny else SIZES
    result = {**describe(device), "sizes": sizes, "folder": os.fspath(args.folder), "milliseconds": rows}
    if not args.tiny or args.output:
        folder = args.output or RESULTS
        path = folder / f"{device_stem(device_name(device))}-async-save.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
