"""The cost of amp.trace_overflow: training steps of a GPT of 12 layers and width 768, with the trace and without.

    python benchmarks/overflow_trace.py
    python benchmarks/overflow_trace.py --tiny --device cpu  # to try the script

Steps run eagerly, and captured by apex.graphs. Rounds with and without the trace take turns in one process. A figure is
the median of all steps, timed one by one between synchronisations.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from amp_models import GPT, half_token_loss
from torch import Tensor

from apex import amp
from apex._bench.environment import describe, device_name, device_stem
from apex.graphs import capture
from apex.optimizers import FusedAdam

RESULTS = Path(__file__).parent / "results"


def times(step: Callable[[], Any], device: torch.device, warmup: int, count: int) -> list[float]:
    """Return the milliseconds of each of `count` steps after `warmup` others."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    found = []
    for index in range(warmup + count):
        wait()
        start = time.perf_counter()
        step()
        wait()
        if index >= warmup:
            found.append((time.perf_counter() - start) * 1e3)
    return found


def measure(batch: int, captures: bool, device: torch.device, rounds: int, tiny: bool) -> dict[str, float]:
    """Return the median milliseconds of a step with the trace and without."""
    torch.manual_seed(0)
    model = GPT(512, 32, 64, 2) if tiny else GPT()
    words, length = (512, 32) if tiny else (50304, 1024)
    model = model.to(device)
    optimizer = FusedAdam(model.parameters(), lr=1e-4)
    options: Any = {"opt_level": "O2", "cast_model_outputs": torch.float16, "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, **options)
    tokens = torch.randint(words, (batch, length), device=device)

    def train_step(tokens: Tensor) -> Tensor:
        loss = half_token_loss(model(tokens), tokens.roll(-1, 1))
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        return loss

    step = capture(train_step) if captures else train_step
    found: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(rounds):
        found["off"] += times(lambda: step(tokens), device, 6, 10)
        with amp.trace_overflow(model):
            found["on"] += times(lambda: step(tokens), device, 6, 10)
    assert not captures or device.type != "cuda" or step.reason is None
    amp.shutdown()
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {**medians, "ratio": medians["on"] / medians["off"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    parser.add_argument("--output", type=Path, help="the result file; by default one in benchmarks/results")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    results: dict[str, Any] = {"environment": describe(device), "steps": {}}
    for batch in (1,) if arguments.tiny else (8, 32):
        for captures in (False, True):
            name = f"{batch} x 1024 tokens, {'captured' if captures else 'eager'}"
            figures = measure(batch, captures, device, arguments.rounds, arguments.tiny)
            results["steps"][name] = figures
            print(f"{name:32} off {figures['off']:8.3f} ms   on {figures['on']:8.3f} ms   {figures['ratio']:.3f}")
    path = arguments.output or RESULTS / f"{device_stem(device_name(device))}-overflow-trace.json"
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
