"""Experts of a mixture on a GPU, beside the way of transformers (PyTorch's `grouped_mm`) and Liger-Kernel's.

    python benchmarks/moe.py [--out FOLDER] [--only NAME] [--liger]

bfloat16, forward and forward + backward, at the sizes of published models and with four routings: every expert the same
number of rows, numbers of rows by Zipf's law, all rows at the first K experts, and only every other expert used.
Milliseconds between CUDA events, the median of passes in turns. A step has 18 N H F operations for N rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from apex._bench.environment import describe, device_name, device_stem
from apex.ops.moe import moe_experts

RESULTS = Path(__file__).parent / "results"
ROUTINGS = ("balanced", "zipf", "one", "empty")
ROUNDS = 11


class Shape(NamedTuple):
    """Sizes of a layer: experts, experts per token, hidden size, width and tokens; `gpt_oss`: its layout and unit."""

    experts: int
    chosen: int
    hidden: int
    width: int
    tokens: int
    gpt_oss: bool = False


SHAPES = {
    "Qwen3-30B, 32k tokens": Shape(128, 8, 2048, 768, 32768),
    "Qwen3-30B, 8k tokens": Shape(128, 8, 2048, 768, 8192),
    "Mixtral": Shape(8, 2, 4096, 14336, 8192),
    "DeepSeek slice": Shape(8, 1, 7168, 2048, 32768),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, 8192, True),
}


def route(shape: Shape, routing: str) -> Tensor:
    """Return the experts of each token, [tokens, chosen], different ones for each token."""
    make = torch.Generator("cuda").manual_seed(0)
    options: Any = {"dtype": torch.float32, "device": "cuda"}
    if routing == "balanced":  # consecutive experts, in turns
        first = torch.arange(shape.tokens, device="cuda", dtype=torch.int64) * shape.chosen
        return (first[:, None] + torch.arange(shape.chosen, device="cuda", dtype=torch.int64)) % shape.experts
    if routing == "one":
        return torch.arange(shape.chosen, device="cuda", dtype=torch.int64).expand(shape.tokens, -1).contiguous()
    rank = torch.arange(1, shape.experts + 1, **options)
    share = 1 / rank if routing == "zipf" else (rank % 2).clamp(min=1e-30)
    noise = torch.rand(shape.tokens, shape.experts, generator=make, **options)
    return (share.log() - (-noise.log()).log()).topk(shape.chosen).indices  # draws without replacement


def tensors(shape: Shape) -> dict[str, Any]:
    make = torch.Generator("cuda").manual_seed(1)

    def normal(*sizes: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(sizes, generator=make, device="cuda", dtype=torch.bfloat16) * scale
        return values.requires_grad_()

    first, second = (2 * shape.width, shape.hidden), (shape.hidden, shape.width)
    if shape.gpt_oss:
        first, second = first[::-1], second[::-1]
    found: dict[str, Any] = {
        "x": normal(shape.tokens, shape.hidden),
        "gate_up": normal(shape.experts, *first, scale=shape.hidden**-0.5),
        "down": normal(shape.experts, *second, scale=shape.width**-0.5),
        "weight": normal(shape.tokens, shape.chosen),
    }
    if shape.gpt_oss:
        found["biases"] = (normal(shape.experts, 2 * shape.width), normal(shape.experts, shape.hidden))
    return found


def ours(shape: Shape, given: dict[str, Any], index: Tensor) -> Tensor:
    options: dict[str, Any] = {}
    if shape.gpt_oss:
        options = dict(bias=given["biases"], activation="clamped", interleaved=True, transposed=True)
    return moe_experts(given["x"], given["gate_up"], given["down"], index, given["weight"], **options)


def grouped(shape: Shape, given: dict[str, Any], index: Tensor) -> Tensor:
    """Compute the experts as transformers 5 does by default: sort, gather, `grouped_mm` twice, sum."""
    product: Any = getattr(functional, "grouped_mm", None) or torch._grouped_mm
    ordered, permutation = index.reshape(-1).sort()
    counts = torch.histc(ordered.int(), bins=shape.experts, min=0, max=shape.experts - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    rows = given["x"][permutation // shape.chosen]
    first, second = (t if shape.gpt_oss else t.transpose(1, 2) for t in (given["gate_up"], given["down"]))
    pre = product(rows, first, offs=ends)
    if shape.gpt_oss:
        pre = pre + given["biases"][0][ordered]
        gate, value = pre[..., ::2].clamp(max=7.0), pre[..., 1::2].clamp(-7.0, 7.0)
        active = (value + 1) * (gate * torch.sigmoid(1.702 * gate))
    else:
        gate, value = pre.chunk(2, -1)
        active = functional.silu(gate) * value
    results = product(active, second, offs=ends)
    if shape.gpt_oss:
        results = results + given["biases"][1][ordered]
    results = results * given["weight"].reshape(-1)[permutation, None]
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(permutation.shape[0], device=index.device, dtype=permutation.dtype)
    return results[inverse].view(shape.tokens, shape.chosen, shape.hidden).sum(1)


def liger(shape: Shape) -> Callable[..., Tensor] | None:
    """Return Liger-Kernel's function of the same arguments, None if it is not installed or has no such unit."""
    try:
        from liger_kernel.ops.fused_moe import LigerFusedMoEFunction
    except ImportError:
        return None
    if shape.gpt_oss:
        return None

    def run(shape: Shape, given: dict[str, Any], index: Tensor) -> Tensor:
        weights = (given["x"], given["gate_up"], given["down"], index.int(), given["weight"])
        return LigerFusedMoEFunction.apply(*weights)

    return run


def milliseconds(run: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def measure(name: str, routing: str, with_liger: bool) -> dict[str, Any]:
    shape = SHAPES[name]
    index, given = route(shape, routing), tensors(shape)
    leaves = [t for value in given.values() for t in (value if isinstance(value, tuple) else (value,))]
    gradient = torch.randn_like(given["x"])
    calls: dict[str, Any] = {"apex": ours, "grouped_mm": grouped, "liger": liger(shape) if with_liger else None}
    calls = {who: call for who, call in calls.items() if call is not None}

    def step(call: Callable[..., Tensor]) -> list[Tensor]:
        output = call(shape, given, index)
        return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]

    expected = step(grouped)
    for actual, wanted in zip(step(ours), expected, strict=True):  # rounded at other places
        error = (actual.float() - wanted.float()).norm() / wanted.float().norm()
        # PyTorch adds up the gradient of an indexed bias in bfloat16, row by row: 0.1 off if one expert has all rows.
        if not error < (0.2 if wanted.dim() == 2 and len(wanted) == shape.experts else 3e-2):
            raise AssertionError(f"{name}, {routing}: {list(wanted.shape)} is off by {float(error):.3f}")
    del expected
    row: dict[str, Any] = {"shape": name, "routing": routing}
    with torch.no_grad():
        runs = {who: (lambda call=call: call(shape, given, index)) for who, call in calls.items()}
        row |= {f"fwd {who}": value for who, value in timed(runs).items()}
    row |= {f"step {who}": v for who, v in timed({w: (lambda c=c: step(c)) for w, c in calls.items()}).items()}
    rows = shape.tokens * shape.chosen
    row["step TFLOPS"] = round(18 * rows * shape.hidden * shape.width / row["step apex"] / 1e9, 1)
    row["step ratio"] = round(row["step apex"] / row["step grouped_mm"], 3)
    return row


def timed(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median milliseconds of each function, called in turns."""
    for run in [*runs.values()] * 2:
        run()
    times: dict[str, list[float]] = {who: [] for who in runs}
    for _ in range(ROUNDS):
        for who, run in runs.items():
            times[who].append(milliseconds(run))
    return {who: round(statistics.median(found), 3) for who, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", default="", help="shapes whose names begin so")
    parser.add_argument("--liger", action="store_true", help="also Liger-Kernel, which tries tiles for minutes first")
    options, device = parser.parse_args(), torch.device("cuda")
    rows = []
    for name in (name for name in SHAPES if name.startswith(options.only)):
        for routing in ROUTINGS:
            rows.append(measure(name, routing, options.liger))
            print(rows[-1], flush=True)
            torch.cuda.empty_cache()
            path = options.out / f"{device_stem(device_name(device))}-moe.json"  # after every row: a run may be stopped
            path.write_text(json.dumps({**describe(device), "milliseconds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
