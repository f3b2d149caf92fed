"""What `apex memory` estimates beside what a step takes on this GPU, for four networks.

    python benchmarks/memory.py --output benchmarks/results/nvidia_h200-memory.json

A GPT of 12 layers, in PyTorch's modules and in those of apex, a network of ResNet-50's shape and a perceptron. Tests
hold 5% of the fixed state and 15% of the peak on the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch
from step_models import GPT, Classifier
from torch import Tensor, nn

from apex._bench.environment import describe
from apex._memory.estimate import estimate, measure
from apex._memory.training import Loss, Settings, Task

LEVELS = ("O0", "O1", "O2", "O5")
OPTIMIZERS = ("FusedAdam", "FusedSGD,momentum=0.9", "FusedLAMB")


def gpt(fused: bool, depth: int = 12, width: int = 768, words: int = 50304, length: int = 1024) -> Task:
    """A GPT and batches of random words."""

    def loss(model: nn.Module, batch: int, device: torch.device) -> Tensor:
        tokens = torch.randint(words, (batch, length + 1), device=device)
        return model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    return lambda: (GPT(depth, width, words, length, fused), loss)


def resnet(size: int = 224, first: int = 64) -> Task:
    """A network of ResNet-50's shape and random images."""

    def loss(model: nn.Module, batch: int, device: torch.device) -> Tensor:
        images = torch.randn(batch, 3, size, size, device=device)
        return model(images, torch.randint(1000, (batch,), device=device))

    return lambda: (Classifier(False, first), loss)


def network() -> tuple[nn.Module, Loss]:
    """For `apex memory benchmarks/memory.py:network --batch 64`."""
    return resnet()()


def perceptron(width: int = 4096, depth: int = 6) -> Task:
    """Dense layers with ReLU."""

    def loss(model: nn.Module, batch: int, device: torch.device) -> Tensor:
        return model(torch.randn(batch, width, device=device)).float().square().mean()

    def make() -> tuple[nn.Module, Loss]:
        return nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU()))), loss

    return make


# Networks and the rows of a batch.
TASKS: dict[str, tuple[Task, int]] = {
    "gpt": (gpt(False), 8),
    "gpt, fused": (gpt(True), 8),
    "resnet50": (resnet(), 64),
    "perceptron": (perceptron(), 8192),
}


def main() -> None:
    """Writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--names", nargs="*", default=list(TASKS))
    options = parser.parse_args()
    device, rows = torch.device("cuda", torch.cuda.current_device()), []
    for name in options.names:
        task, batch = TASKS[name]
        for level in LEVELS:
            for optimizer in OPTIMIZERS:
                settings = Settings(level, optimizer, batch)
                found, real = estimate(task, settings), measure(task, settings, device)
                errors = {
                    each: round((getattr(found, each) + found.workspace) / getattr(real, each) - 1, 4)
                    for each in ("fixed", "peak")
                }
                what = {"network": name, "opt_level": level, "optimizer": optimizer, "batch": batch, "error": errors}
                rows.append(what | {"estimated": dataclasses.asdict(found), "measured": dataclasses.asdict(real)})
                print(name, level, optimizer, errors, flush=True)
                document = {**describe(device), "unit": "bytes", "rows": rows}
                options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
