"""Steps of FusedAdam with state on the GPU and in host memory, on the parameters of a GPT of 1.3 billion.

    python benchmarks/offload.py
    python benchmarks/offload.py --tiny --device cpu  # to try the script

Parameters and gradients are bfloat16. "ms" are medians of whole steps, "MiB" the most GPU memory during the steps
beyond parameters and gradients, "GB" the state in host memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from state_formats import shapes

from apex._bench.environment import describe, device_name, device_stem
from apex.optimizers import FusedAdam, OffloadedOptimizer

RESULTS = Path(__file__).parent / "results"
SMALL: dict[str, Any] = {"master_bits": 24, "state_format": "int8"}
CASES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "int8 state, 24 bits of master: resident": (None, SMALL),
    "int8 state, 24 bits of master: offloaded": ("gpu", SMALL),
    "int8 state, 24 bits of master: half offloaded": ("gpu", {**SMALL, "fraction": 0.5}),
    "float32 state and masters: resident": (None, {"master_weights": True}),
    "float32 state and masters: offloaded": ("gpu", {"master_weights": True}),
    "float32 state and masters: updated on the CPU": ("cpu", {"master_weights": True}),
}


def milliseconds(optimizer: torch.optim.Optimizer, device: torch.device, rounds: int) -> float:
    """Return the median time of a step; the first ones make state and compile."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    times = []
    for _ in range(rounds + 2):
        wait()
        start = time.perf_counter()
        optimizer.step()
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(times[2:]), 2)


def measure(sizes: list[tuple[int, ...]], device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    """Return time and memory of every case."""
    params = [torch.nn.Parameter(0.02 * torch.randn(shape, device=device, dtype=torch.bfloat16)) for shape in sizes]
    for param in params:
        param.grad = torch.randn_like(param)
    is_gpu = device.type == "cuda"
    results: dict[str, dict[str, float]] = {}
    for name, (where, options) in CASES.items():
        gc.collect()
        before = 0
        if is_gpu:
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        options = {"lr": 1e-5, "weight_decay": 0.1, **options}
        optimizer: FusedAdam | OffloadedOptimizer = (
            FusedAdam(params, **options) if where is None else OffloadedOptimizer(params, where=where, **options)
        )
        taken = milliseconds(optimizer, device, rounds if where != "cpu" else 2)
        used = torch.cuda.max_memory_allocated() - before if is_gpu else 0
        states = [value for state in optimizer.state.values() for value in state.values()]
        nbytes = sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
        results[name] = {"ms": taken, "MiB": used >> 20, "GB": 0 if where is None else round(nbytes / 1e9, 2)}
        print(name, results[name], flush=True)
        del optimizer, states
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    sizes = shapes(1, 64, 100) if arguments.tiny else shapes(24, 2048, 50304)
    report = {"environment": describe(device), "cases": measure(sizes, device, arguments.rounds)}
    output = arguments.output or RESULTS / f"{device_stem(device_name(device))}-offload.json"
    if not arguments.tiny:
        output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
