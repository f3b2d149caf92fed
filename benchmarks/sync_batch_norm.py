"""SyncBatchNorm in several processes: apex.parallel beside PyTorch, forward and backward in training.

    python benchmarks/sync_batch_norm.py --output benchmarks/results/aarch64-cpu-sync_batch_norm.json
    python benchmarks/sync_batch_norm.py --device cuda --processes 8

PyTorch's SyncBatchNorm refuses input on a CPU, for which it has no kernels; there its place is taken by its steps
written with PyTorch's operators (`ByHand`). In every round all contenders run one
after the other, so that a drift of the machine hits all alike; a figure is the median over the rounds of what the
slowest process took.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex.parallel import SyncBatchNorm

# images per process, channels, side of an image
SHAPES = {
    "cpu": ((8, 64, 56), (8, 256, 28), (8, 512, 14), (2, 64, 14)),
    "cuda": ((64, 64, 112), (64, 256, 56), (64, 512, 28), (32, 2048, 7)),
}


class ByHand(torch.autograd.Function):
    """The steps of PyTorch's SyncBatchNorm, one operator after the other."""

    @staticmethod
    def forward(ctx: Any, x, weight, bias, running_mean, running_var, group):  # type: ignore[override]
        dimensions, spread = (0, 2, 3), (1, -1, 1, 1)
        mean = x.mean(dimensions)
        variance = (x - mean.view(spread)).square().mean(dimensions)  # 15 times as fast as torch.var_mean on a CPU
        count = x.numel() // x.shape[1]
        rank_stats = torch.cat((mean, variance, mean.new_full((1,), count)))
        gathered = [torch.empty_like(rank_stats) for _ in range(group.size())]
        dist.all_gather(gathered, rank_stats, group=group)
        means, variances, counts = torch.stack(gathered).split((x.shape[1], x.shape[1], 1), 1)
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        variance = ((variances + (means - mean).square()) * counts).sum(0) / total
        running_mean.lerp_(mean, 0.1)
        running_var.lerp_(variance * (total / (total - 1)), 0.1)
        inverse = (variance + 1e-5).rsqrt()
        ctx.save_for_backward(x, mean, inverse, weight, total)
        ctx.group = group
        return (x - mean.view(spread)) * (inverse * weight).view(spread) + bias.view(spread)

    @staticmethod
    def backward(ctx: Any, dy):  # type: ignore[override]
        x, mean, inverse, weight, total = ctx.saved_tensors
        dimensions, spread = (0, 2, 3), (1, -1, 1, 1)
        normalised = (x - mean.view(spread)) * inverse.view(spread)
        dbias, dweight = dy.sum(dimensions), (dy * normalised).sum(dimensions)
        sums = torch.cat((dbias, dweight))
        dist.all_reduce(sums, group=ctx.group)
        mean_dy, mean_dy_xhat = (sums / total).chunk(2)
        dx = dy - mean_dy.view(spread) - normalised * mean_dy_xhat.view(spread)
        return dx * (inverse * weight).view(spread), dweight, dbias, None, None, None


class HandWritten(nn.BatchNorm2d):
    """PyTorch's SyncBatchNorm by operators that a CPU has."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        return ByHand.apply(x, self.weight, self.bias, self.running_mean, self.running_var, dist.group.WORLD)


def contenders(device: torch.device, channels: int) -> dict[str, nn.Module]:
    """The norms to compare, by name."""
    theirs = ("torch", nn.SyncBatchNorm) if device.type == "cuda" else ("torch, by hand", HandWritten)
    return {name: make(channels).to(device) for name, make in (("ours", SyncBatchNorm), theirs)}


def seconds(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """Seconds per call, in the slowest process."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    taken = torch.tensor([(time.perf_counter() - begin) / calls], dtype=torch.float64, device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def measure(shape: tuple[int, int, int], layout: str, device: torch.device, rounds: int, calls: int) -> dict:
    """Milliseconds of forward and of forward with backward, by contender."""
    images, channels, side = shape
    memory_format = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    x, dy = (torch.randn(images, channels, side, side, device=device).to(memory_format=memory_format) for _ in "xy")
    norms = contenders(device, channels)
    samples: dict[str, dict[str, list[float]]] = {name: {"fwd": [], "step": []} for name in norms}

    def step(norm: nn.Module) -> None:
        norm.zero_grad()
        norm(x).backward(dy)

    x.requires_grad_()
    for turn in range(rounds + 1):
        for name, norm in sorted(norms.items(), reverse=bool(turn % 2)):  # the first pays for the other's memory
            found = (seconds(lambda n=norm: n(x), device, calls), seconds(lambda n=norm: step(n), device, calls))
            if turn:  # the first round warms up
                for kind, value in zip(("fwd", "step"), found, strict=True):
                    samples[name][kind].append(1e3 * value)
    outputs = [norm(x).detach().double() for norm in norms.values()]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)
    return {
        name: {kind: statistics.median(values) for kind, values in kinds.items()} for name, kinds in samples.items()
    }


def work(rank: int, arguments: argparse.Namespace) -> None:
    """One process."""
    torch.set_num_threads(max(1, torch.get_num_threads() // arguments.processes))
    device = torch.device(arguments.device, rank) if arguments.device == "cuda" else torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{arguments.store}", rank=rank, world_size=arguments.processes)
    rows = []
    for shape in SHAPES[arguments.device]:
        for layout in ("nchw", "nhwc"):
            found = measure(shape, layout, device, arguments.rounds, arguments.calls)
            rows.append({"shape": "x".join(map(str, (*shape, shape[-1]))), "layout": layout, "milliseconds": found})
            if rank == 0:
                _print(rows[-1])
    if rank == 0 and arguments.output:
        about = {"machine": platform.machine(), "torch": torch.__version__, "processes": arguments.processes}
        arguments.output.write_text(json.dumps({**about, "backend": backend, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


def _print(row: dict) -> None:
    ours, theirs = row["milliseconds"].values()
    parts = [
        f"{kind} {ours[kind]:.3f} ms, torch {theirs[kind]:.3f} ms, {ours[kind] / theirs[kind]:.2f}" for kind in ours
    ]
    print(f"{row['shape']} {row['layout']}: {'; '.join(parts)}", flush=True)


def main() -> None:
    """Starts the processes, or is one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(SHAPES), default="cpu")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        work(arguments.rank, arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        store = ["--store", str(Path(folder, "store"))]
        started = [
            subprocess.Popen([sys.executable, *sys.argv, *store, "--rank", str(rank)])
            for rank in range(arguments.processes)
        ]
        codes = [process.wait() for process in started]
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
