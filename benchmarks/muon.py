"""Steps of Muon on the matrices of a GPT of 1.3 billion parameters, beside PyTorch's and microsoft/dion's.

    python benchmarks/muon.py
    python benchmarks/muon.py --tiny --device cpu  # to try the script

Times are medians of whole steps until the GPU has finished; the optimizers take turns. "host" has the times until
`step` returns. "products" has the symmetric product of the iteration beside PyTorch's whole one. dion, if its folder is
on PYTHONPATH, runs its Triton products, whose autotuner tries six configurations here instead of thirty.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from apex._bench.environment import describe, device_name, device_stem
from apex.ops.newton_schulz import op, reference
from apex.optimizers import FusedMuon

RESULTS = Path(__file__).parent / "results"
LAYERS, WIDTH = 24, 2048


def milliseconds(
    calls: dict[str, Callable[[], Any]], device: torch.device, rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the median time of each call, and the median time until it returns; the calls take turns."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    times: dict[str, list[float]] = {name: [] for name in calls}
    host: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 2):
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            call()
            returned = time.perf_counter()
            wait()
            if index > 1:  # the first two make state and compile
                times[name].append(1e3 * (time.perf_counter() - start))
                host[name].append(1e3 * (returned - start))
    total, until_return = ({n: round(statistics.median(v), 3) for n, v in each.items()} for each in (times, host))
    return total, until_return


def parameters(shapes: list[tuple[int, int]], device: torch.device) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def dion(params: list[torch.nn.Parameter]) -> dict[str, torch.optim.Optimizer]:
    """Return dion's Muon by its ways, none if it is not installed."""
    try:
        from dion import Muon, newton_schulz_triton
    except ImportError:
        return {}
    for kernel in (newton_schulz_triton.ns_line_1_kernel, newton_schulz_triton.ns_line_2_kernel):
        sizes = [{"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": 64} for n in (128, 256)]
        kernel.configs = [each for each in kernel.configs if any(size.items() <= each.kwargs.items() for size in sizes)]
    ways: dict[str, torch.optim.Optimizer] = {"dion": Muon(params, use_triton=True, nesterov=True)}
    if find_spec("gram_newton_schulz"):  # with PyTorch's products: its own are CuTe's
        ways["dion, Gram"] = Muon(params, use_gram_newton_schulz=True, nesterov=True)
    return ways


def steps(
    shapes: list[tuple[int, int]], device: torch.device, rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Measure whole steps on parameters of these shapes; see `milliseconds`."""
    params = parameters(shapes, device)
    optimizers: dict[str, torch.optim.Optimizer] = {
        "apex": FusedMuon(params),
        "apex, standard iteration": FusedMuon(params, ns_method="standard"),
    }
    if hasattr(torch.optim, "Muon"):
        optimizers["torch.optim.Muon"] = torch.optim.Muon(params)
    if device.type == "cuda":
        optimizers |= dion(params)
    return milliseconds({name: optimizer.step for name, optimizer in optimizers.items()}, device, rounds)


def products(shapes: list[tuple[int, int, int]], device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    """Measure X Xᵀ, or Xᵀ X of tall matrices, of batches of these shapes in float16."""
    rows = {}
    for shape in shapes:
        matrices = torch.randn(shape, device=device, dtype=torch.float16)
        short = matrices if shape[1] <= shape[2] else matrices.mT
        multiply = {"torch": reference.product, **({"apex": op.launch} if device.type == "cuda" else {})}
        calls = {name: lambda f=f, x=short: f(x, x, 1.0, None, 0.0) for name, f in multiply.items()}
        rows["x".join(map(str, shape))] = milliseconds(calls, device, rounds)[0]
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
    elements = sum(rows * columns for rows, columns in shapes)
    names = f"{elements / 1e9:.3g}e9 elements in {len(shapes)} matrices", f"{len(many)} matrices of 256 x 256"
    measured = {name: steps(each, device, arguments.rounds) for name, each in zip(names, (shapes, many), strict=True)}
    record = {
        **describe(device),
        "unit": "ms",
        "steps": {name: total for name, (total, _) in measured.items()},
        "host": {name: until_return for name, (_, until_return) in measured.items()},
        "products": products(batches, device, arguments.rounds),
    }
    path = arguments.output or RESULTS / f"{device_stem(device_name(device))}-muon.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({name: record[name] for name in ("steps", "host", "products")}, indent=1))


if __name__ == "__main__":
    main()
