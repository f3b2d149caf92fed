"""What a training step costs beside the model: the Booster, Hugging Face's accelerate and Lightning's Fabric.

    python benchmarks/booster.py --output benchmarks/results/cpu-booster.json

The model is so small that a step is mostly overhead. Steps of all of them take turns, and each number is the median of
many rounds, in microseconds: of CPU time on a CPU, which other work on the machine does not change. The packages that
are not installed are left out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from apex.booster import Booster

Step = Callable[[], None]
ROWS, FEATURES = 16, 32


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, FEATURES))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def loop(model: Any, optimizer: Any, device: str, backward: Callable[[Any], None]) -> Step:
    inputs = torch.randn(ROWS, FEATURES, device=device)

    def step() -> None:
        optimizer.zero_grad()
        backward(model(inputs).square().mean())
        optimizer.step()

    return step


def plain(precision: str | None, device: str) -> Step:
    """PyTorch by hand."""
    model, optimizer = parts()
    model.to(device)
    inputs = torch.randn(ROWS, FEATURES, device=device)
    dtype = {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype, enabled=precision is not None):
            loss = model(inputs).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def booster(precision: str | None, device: str) -> Step:
    front = Booster(device, precision)
    model, optimizer, *_ = front.boost(*parts())
    return loop(model, optimizer, device, lambda loss: front.backward(loss, optimizer))


def accelerate(precision: str | None, device: str) -> Step:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # it has one precision in a process
    front = Accelerator(mixed_precision=precision or "no", cpu=device == "cpu")
    model, optimizer = front.prepare(*parts())
    return loop(model, optimizer, device, front.backward)


def fabric(precision: str | None, device: str) -> Step:
    from lightning_fabric import Fabric

    name = {None: "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[precision]
    front = Fabric(accelerator=device, devices=1, precision=name)  # type: ignore[arg-type]
    model, optimizer = front.setup(*parts())
    return loop(model, optimizer, device, front.backward)


FRONTS: dict[str, Callable[[str | None, str], Step]] = {
    "plain PyTorch": plain,
    "apex": booster,
    "accelerate": accelerate,
    "lightning-fabric": fabric,
}


def measure(precision: str | None, device: str, rounds: int, steps: int) -> dict[str, float]:
    """Microseconds of a step."""
    made: dict[str, Step] = {}
    for name, make in FRONTS.items():
        try:
            made[name] = make(precision, device)
        except (ImportError, ValueError) as error:  # not installed, or no such precision there
            print(f"{name} is left out: {error}")
    found: dict[str, list[float]] = {name: [] for name in made}
    clock = time.process_time if device == "cpu" else time.perf_counter
    for turn in range(rounds + 2):
        for name, step in made.items():
            if device != "cpu":
                torch.accelerator.synchronize()
            start = clock()
            for _ in range(steps):
                step()
            if device != "cpu":
                torch.accelerator.synchronize()
            if turn >= 2:
                found[name].append((clock() - start) / steps * 1e6)
    return {name: round(statistics.median(values), 1) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=50, help="steps of each in a round")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    versions = {}
    for package in ("torch", "accelerate", "lightning-fabric"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    device = platform.machine() if arguments.device == "cpu" else torch.cuda.get_device_name()
    report: dict[str, Any] = {"device": device, "versions": versions, "microseconds per step": {}}
    for precision in (None, "bf16", *(["fp16"] if arguments.device != "cpu" else [])):
        row = measure(precision, arguments.device, arguments.rounds, arguments.steps)
        report["microseconds per step"][precision or "float32"] = row
        print(precision or "float32", row)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
