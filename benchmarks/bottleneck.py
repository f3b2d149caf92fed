"""A ResNet bottleneck with frozen batch norms, forward and backward: apex beside the same block in PyTorch.

    python benchmarks/bottleneck.py
    python benchmarks/bottleneck.py --tiny  # on a CPU, to try the script

"torch" has the norms as a product and a sum, "torch, batch norm" as nn.BatchNorm2d in eval mode, both in channels_last
with cuDNN; "apex, kept scales" has called get_scale_bias_callable(). Each column is also measured in a graph, which
leaves out the host. All columns have the same weights and inputs; they take turns, one round each at a time, so that a
drift of the machine hits all alike, and all threads stay on one core, as in `apex bench`. A figure is the median of the
rounds, in milliseconds. The result file is written after every block.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from apex._bench import cores
from apex._bench.environment import describe, device_name, device_stem
from apex.contrib.bottleneck import Bottleneck

KEPT = "apex, kept scales"
RESULTS = Path(__file__).parent / "results"


class Block(NamedTuple):
    """Channels in, between and out, stride, batch, height and width."""

    channels_in: int
    between: int
    out: int
    stride: int
    batch: int
    height: int
    width: int


BLOCKS = (
    Block(256, 64, 256, 1, 64, 56, 56),
    Block(512, 128, 512, 1, 64, 28, 28),
    Block(1024, 256, 1024, 1, 64, 14, 14),
    Block(256, 128, 512, 2, 64, 56, 56),
    Block(256, 64, 256, 1, 4, 200, 336),
    Block(512, 256, 1024, 2, 4, 100, 168),
)


class Frozen(nn.Module):
    """A frozen norm in PyTorch's operators."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * self.running_var.rsqrt()
        bias = self.bias - self.running_mean * scale
        return x * scale.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)


class Plain(nn.Module):
    """The block in PyTorch's layers; `Norm` makes a frozen norm."""

    def __init__(self, block: Block, Norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        into, between, out, stride, *_ = block
        self.downsample = None
        if stride != 1 or into != out:
            self.downsample = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), Norm(out))
        self.conv1 = nn.Conv2d(into, between, 1, stride, bias=False)
        self.conv2 = nn.Conv2d(between, between, 3, padding=1, bias=False)
        self.conv3 = nn.Conv2d(between, out, 1, bias=False)
        self.bn1, self.bn2, self.bn3 = Norm(between), Norm(between), Norm(out)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


def batch_norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels).requires_grad_(False).eval()


def columns_of(block: Block, device: str, dtype: torch.dtype) -> dict[str, nn.Module]:
    ours = Bottleneck(*block[:4], use_cudnn=True)
    kept = Bottleneck(*block[:4], use_cudnn=True)
    made = {"torch": Plain(block, Frozen), "torch, batch norm": Plain(block, batch_norm), "apex": ours, KEPT: kept}
    for module in made.values():
        module.load_state_dict(ours.state_dict(), strict=False)
        module.to(device, dtype).to(memory_format=torch.channels_last)
    kept.get_scale_bias_callable()
    return made


def step_of(module: nn.Module, x: Tensor, dy: Tensor, backward: bool) -> Callable[[], None]:
    inputs = (x, *(parameter for parameter in module.parameters() if parameter.requires_grad))

    def step() -> None:
        with torch.set_grad_enabled(backward):
            y = module(x)
        if backward:
            torch.autograd.grad(y, inputs, dy)

    return step


def in_a_graph(step: Callable[[], None]) -> Callable[[], None]:
    """A replay of the step; the warm-up is over."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def milliseconds(step: Callable[[], None], arguments: argparse.Namespace) -> float:
    wait = torch.cuda.synchronize if arguments.device == "cuda" else (lambda: None)
    wait()
    start = time.perf_counter()
    for _ in range(arguments.steps):
        step()
    wait()
    return 1000 * (time.perf_counter() - start) / arguments.steps


def measure(block: Block, dtype: torch.dtype, arguments: argparse.Namespace) -> dict[str, Any]:
    """Every column of one block, and its time as a multiple of torch's."""
    torch.manual_seed(0)
    x = torch.randn(block.batch, block.channels_in, block.height, block.width, device=arguments.device, dtype=dtype)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    modules = columns_of(block, arguments.device, dtype)
    dy = torch.randn_like(modules["torch"](x))
    found: dict[str, Any] = {}
    for what, backward in (("forward", False), ("forward and backward", True)):
        steps = {}
        for name, module in modules.items():
            steps[name] = step_of(module, x, dy, backward)
            for _ in range(3):
                steps[name]()
            if arguments.device == "cuda":
                steps[f"{name}, graph"] = in_a_graph(steps[name])
        rounds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(arguments.rounds):
            for name, step in steps.items():
                rounds[name].append(milliseconds(step, arguments))
        times = {name: statistics.median(figures) for name, figures in rounds.items()}
        plain = {name: times["torch, graph" if name.endswith("graph") else "torch"] for name in times}
        found[what] = {
            name: {"milliseconds": round(time_, 4), "times_torch": round(time_ / plain[name], 4)}
            for name, time_ in times.items()
        }
    expected, actual = (modules[name](x).detach().float() for name in ("torch", "apex"))
    found["largest_difference"] = float((expected - actual).abs().max() / expected.abs().max())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="passes per round")
    parser.add_argument("--rounds", type=int, default=9, help="how often the columns take turns")
    parser.add_argument("--dtypes", nargs="+", default=["float16", "bfloat16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tune", action="store_true", help="with torch.backends.cudnn.benchmark")
    parser.add_argument("--tiny", action="store_true", help="tiny blocks, to try the script")
    parser.add_argument("--output", type=Path, help="the result file; by default one in benchmarks/results")
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = arguments.tune
    device = torch.device(arguments.device)
    path = arguments.output or RESULTS / f"{device_stem(device_name(device))}-bottleneck.json"
    results: dict[str, Any] = {"environment": describe(device), "cudnn_benchmark": arguments.tune, "blocks": {}}
    one_core = arguments.device == "cuda" and cores.may_be_chosen()
    results["cores"] = 1 if one_core else os.cpu_count()
    with cores.one_core() if one_core else contextlib.nullcontext():
        for dtype in arguments.dtypes:
            for block in [Block(8, 4, 8, 1, 2, 6, 6), Block(8, 4, 16, 2, 2, 6, 6)] if arguments.tiny else BLOCKS:
                name = f"{dtype} {'x'.join(map(str, block))}"
                results["blocks"][name] = measure(block, getattr(torch, dtype), arguments)
                path.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results["blocks"], indent=1))


if __name__ == "__main__":
    main()
