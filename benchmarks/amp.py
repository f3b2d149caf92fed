"""Whole training steps in mixed precision: apex.amp beside torch.amp, every contender in a process of its own.

    python benchmarks/amp.py --output benchmarks/results/nvidia_h200-amp.json

Contenders take turns for several rounds, so that a drift of the machine hits all alike; a figure is the median over
rounds of the median step. One process each, because amp's casts are switched on for a whole process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Contenders: how each prepares model and optimizer is in `prepare`.
CONTENDERS = (
    "fp32",
    "torch.amp fp16",
    "apex O1 torch optimizer",
    "apex O1 fused optimizer",
    "apex O2 fused optimizer",
    "torch.amp bf16",
    "apex O4 fused optimizer",
    "apex O5 fused optimizer",
)


class Bottleneck(nn.Module):
    """A residual block of three convolutions."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        same = stride == 1 and inputs == 4 * width
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convolutions(x) + self.shortcut(x))


def resnet50() -> nn.Module:
    """A network of ResNet-50's shape."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for index in range(count):
            layers.append(Bottleneck(inputs, width, 2 if index == 0 and width > 64 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.attention(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A language model of GPT-2 small's shape."""

    def __init__(self, vocabulary: int = 50304, length: int = 1024, width: int = 768, depth: int = 12) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def problem(
    name: str, device: str, small: bool
) -> tuple[nn.Module, Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]:
    """Model, inputs, targets and loss."""
    torch.manual_seed(0)
    if name == "resnet50":
        batch, size = (2, 64) if small else (128, 224)
        model = resnet50().to(device, memory_format=torch.channels_last)
        images = torch.randn(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
        return model, images, torch.randint(1000, (batch,), device=device), F.cross_entropy
    batch, length = (1, 32) if small else (8, 1024)
    model = GPT(512, 32, 64, 2) if small else GPT()
    tokens = torch.randint(512, (batch, length), device=device)
    loss = lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten())  # noqa: E731
    return model.to(device), tokens, tokens.roll(-1, 1), loss


def optimizer_for(name: str, model: nn.Module, fused_by_apex: bool) -> torch.optim.Optimizer:
    """SGD for the network of images, AdamW for the language model."""
    from apex.optimizers import FusedAdam, FusedSGD

    if name == "resnet50":
        options = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
        kind = FusedSGD if fused_by_apex else torch.optim.SGD
        return kind(model.parameters(), **options, **({} if fused_by_apex else {"fused": True}))
    if fused_by_apex:
        return FusedAdam(model.parameters(), lr=1e-4, weight_decay=0.01)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)


def prepare(contender: str, name: str, device: str, small: bool) -> tuple[Callable[[], None], float]:
    """A training step, and how long amp.initialize took in milliseconds."""
    model, inputs, targets, criterion = problem(name, device, small)
    optimizer = optimizer_for(name, model, contender.endswith("fused optimizer"))
    if contender == "fp32":

        def plain_step() -> None:
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()

        return plain_step, 0.0
    if contender.startswith("torch.amp"):
        half = torch.float16 if contender.endswith("fp16") else torch.bfloat16
        scaler = torch.amp.GradScaler(device, enabled=half == torch.float16)

        def torch_step() -> None:
            optimizer.zero_grad()
            with torch.autocast(device, dtype=half):
                loss = criterion(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        return torch_step, 0.0

    from apex import amp

    start = time.perf_counter()
    model, optimizer = amp.initialize(model, optimizer, opt_level=contender.split()[1], verbosity=0)
    milliseconds = 1e3 * (time.perf_counter() - start)

    def apex_step() -> None:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    return apex_step, milliseconds


def measure(contender: str, name: str, device: str, small: bool, steps: int) -> dict[str, object]:
    """One contender's figures, in this process."""
    step, initialize = prepare(contender, name, device, small)
    on_gpu = device == "cuda"
    wait = torch.cuda.synchronize if on_gpu else (lambda: None)
    for _ in range(5 if on_gpu else 1):
        step()
    wait()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        times.append(1e3 * (time.perf_counter() - start) / steps)
    result: dict[str, object] = {"milliseconds": statistics.median(times), "initialize_milliseconds": initialize}
    if on_gpu:
        result["peak_mebibytes"] = torch.cuda.max_memory_allocated() / 2**20
        result["waits_for_the_gpu"] = waits(step)
    return result


def waits(step: Callable[[], None]) -> bool:
    """Whether a step makes the host wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def run_all(arguments: argparse.Namespace) -> dict[str, object]:
    """Every contender in turn, for several rounds."""
    results: dict[str, dict[str, dict[str, object]]] = {}
    for name in arguments.models:
        rounds: dict[str, list[dict[str, object]]] = {contender: [] for contender in arguments.contenders}
        for _ in range(arguments.rounds):
            for contender in arguments.contenders:
                command = [sys.executable, __file__, "--child", contender, "--models", name]
                command += ["--device", arguments.device, "--steps", str(arguments.steps)]
                command += ["--small"] if arguments.small else []
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(f"{contender} on {name} failed:\n{done.stderr[-2000:]}")
                rounds[contender].append(json.loads(done.stdout.splitlines()[-1]))
                print(f"{name:9} {contender:26} {rounds[contender][-1]}", flush=True)
        results[name] = {
            contender: {**each[-1], "milliseconds": statistics.median(float(r["milliseconds"]) for r in each)}  # type: ignore[arg-type]
            for contender, each in rounds.items()
        }
    return {
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "rounds": arguments.rounds,
        "steps": arguments.steps,
        "results": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet50", "gpt2"], choices=["resnet50", "gpt2"])
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20, help="steps per measurement, of which there are three")
    parser.add_argument("--rounds", type=int, default=2, help="how often the contenders take turns")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(
            json.dumps(
                measure(arguments.child, arguments.models[0], arguments.device, arguments.small, arguments.steps)
            )
        )
        return
    report = run_all(arguments)
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
