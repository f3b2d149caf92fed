"""Steps of FusedAdam with every format of state on the parameters of a GPT of 1.3 billion, beside PyTorch's AdamW.

    python benchmarks/state_formats.py
    python benchmarks/state_formats.py --tiny --device cpu  # to try the script

Times are medians of CUDA events over whole steps; a step is launched while the one before it runs, as in training.
Parameters and gradients are bfloat16. "bytes" are parameter, gradient and state per parameter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from apex._bench.environment import describe, device_name, device_stem
from apex.optimizers import FusedAdam

RESULTS = Path(__file__).parent / "results"
CASES: dict[str, dict[str, Any]] = {
    "float32 masters, float32 state": {"master_weights": True},
    "32 bits of master, float32 state": {"master_bits": 32},
    "32 bits of master, bfloat16 state": {"master_bits": 32, "state_format": "bfloat16"},
    "32 bits of master, float8 state": {"master_bits": 32, "state_format": "float8"},
    "24 bits of master, int8 state": {"master_bits": 24, "state_format": "int8"},
    "stochastic rounding, int8 state": {"stochastic_rounding": True, "state_format": "int8"},
}


def shapes(layers: int, width: int, words: int) -> list[tuple[int, ...]]:
    """Return the shapes of a GPT's parameters."""
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    vectors = [(3 * width,), (width,), (4 * width,), *[(width,)] * 5]
    return [(words, width), (2048, width), *(matrices + vectors) * layers, (width,), (width,)]


def milliseconds(optimizer: torch.optim.Optimizer, device: torch.device, rounds: int) -> float:
    """Return the median time of a step."""
    times = []
    for index in range(rounds + 3):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            optimizer.step()  # the GPU is busy with it while the host launches the next one
            start.record()
            optimizer.step()
            end.record()
            end.synchronize()
            elapsed = start.elapsed_time(end)
        else:
            begin = time.perf_counter()
            optimizer.step()
            elapsed = 1e3 * (time.perf_counter() - begin)
        if index > 2:  # the first ones make state and compile
            times.append(elapsed)
    return round(statistics.median(times), 3)


def measure(sizes: list[tuple[int, ...]], device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    """Return time and bytes per parameter of every case."""
    params = [torch.nn.Parameter(0.02 * torch.randn(shape, device=device, dtype=torch.bfloat16)) for shape in sizes]
    for param in params:
        param.grad = torch.randn_like(param)
    count = sum(param.numel() for param in params)
    results: dict[str, dict[str, float]] = {}
    for name, options in (*CASES.items(), ("torch.optim.AdamW, fused, bfloat16 state", {})):
        if options:
            optimizer: torch.optim.Optimizer = FusedAdam(params, lr=1e-5, weight_decay=0.1, **options)
        else:
            optimizer = torch.optim.AdamW(params, lr=1e-5, weight_decay=0.1, fused=True)
        taken = milliseconds(optimizer, device, rounds)
        states = (value for state in optimizer.state.values() for value in state.values())
        nbytes = sum(value.nbytes for value in states if isinstance(value, torch.Tensor) and value.numel() > 1)
        results[name] = {"ms": taken, "bytes": round(4 + nbytes / count, 3)}
        print(name, results[name], flush=True)
        del optimizer
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    sizes = shapes(1, 64, 100) if arguments.tiny else shapes(24, 2048, 50304)
    report = {"environment": describe(device), "cases": measure(sizes, device, arguments.rounds)}
    output = arguments.output or RESULTS / f"{device_stem(device_name(device))}-state-formats.json"
    if not arguments.tiny:
        output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
