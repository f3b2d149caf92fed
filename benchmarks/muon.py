"""Steps of Muon on the matrices of a GPT of 1.3 billion parameters, beside PyTorch's.

    python benchmarks/muon.py
    python benchmarks/muon.py --tiny --device cpu  # to try the script

Times are medians of CUDA events over whole steps; the optimizers take turns. "products" has the symmetric product of
the iteration beside PyTorch's whole one.
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

from apex._bench.environment import describe, device_name, device_stem
from apex.ops.newton_schulz import op, reference
from apex.optimizers import FusedMuon

RESULTS = Path(__file__).parent / "results"
LAYERS, WIDTH = 24, 2048


def milliseconds(calls: dict[str, Callable[[], Any]], device: torch.device, rounds: int) -> dict[str, float]:
    """Return the median time of each call; the calls take turns."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 2):
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            call()
            wait()
            if index > 1:  # the first two make state and compile
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


def parameters(shapes: list[tuple[int, int]], device: torch.device) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def steps(shapes: list[tuple[int, int]], device: torch.device, rounds: int) -> dict[str, float]:
    """Measure whole steps on parameters of these shapes."""
    params = parameters(shapes, device)
    optimizers: dict[str, torch.optim.Optimizer] = {
        "apex": FusedMuon(params),
        "apex, standard iteration": FusedMuon(params, ns_method="standard"),
    }
    if hasattr(torch.optim, "Muon"):
        optimizers["torch.optim.Muon"] = torch.optim.Muon(params)
    return milliseconds({name: optimizer.step for name, optimizer in optimizers.items()}, device, rounds)


def products(shapes: list[tuple[int, int, int]], device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    """Measure X Xᵀ, or Xᵀ X of tall matrices, of batches of these shapes in float16."""
    rows = {}
    for shape in shapes:
        matrices = torch.randn(shape, device=device, dtype=torch.float16)
        short = matrices if shape[1] <= shape[2] else matrices.mT
        multiply = {"torch": reference.product, **({"apex": op.launch} if device.type == "cuda" else {})}
        calls = {name: lambda f=f, x=short: f(x, x, 1.0, None, 0.0) for name, f in multiply.items()}
        rows["x".join(map(str, shape))] = milliseconds(calls, device, rounds)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="the result file; by default one in benchmarks/results")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    width, layers = (32, 1) if arguments.tiny else (WIDTH, LAYERS)
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers
    many = [(256, 256)] * (4 if arguments.tiny else 1000)
    batches = [(layers, width, width), (layers, width, 4 * width), (layers, 4 * width, width)]
    record = {
        **describe(device),
        "unit": "ms",
        "steps": {
            f"{sum(rows * columns for rows, columns in shapes) / 1e9:.3g}e9 elements in {len(shapes)} matrices": steps(
                shapes, device, arguments.rounds
            ),
            f"{len(many)} matrices of 256 x 256": steps(many, device, arguments.rounds),
        },
        "products": products(batches, device, arguments.rounds),
    }
    path = arguments.output or RESULTS / f"{device_stem(device_name(device))}-muon.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({name: record[name] for name in ("steps", "products")}, indent=1))


if __name__ == "__main__":
    main()
