"""Losses of a small bfloat16 GPT over 1,000 steps with every format of optimizer state, from several seeds.

    python benchmarks/state_curves.py
    python benchmarks/state_curves.py --tiny --device cpu  # to try the script

Each run trains on the bytes of PyTorch's Python files; all runs of a seed have the same weights at the start and see
the same bytes. In "float32, perturbed" one weight in a thousand was moved to a neighbouring number: how far its losses
are from those of "float32" says which differences are chance. Steps are captured.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from step_models import GPT
from torch import Tensor

from apex import graphs
from apex._bench.environment import describe, device_name, device_stem
from apex.optimizers import FusedAdam

RESULTS = Path(__file__).parent / "results"
PERTURBED = "float32, perturbed"
FLOAT32: dict[str, Any] = {"master_weights": True}
RUNS: dict[str, dict[str, Any]] = {
    "float32": FLOAT32,
    PERTURBED: FLOAT32,
    "bfloat16, 32 bits of master": {"state_format": "bfloat16", "master_bits": 32},
    "float8, 32 bits of master": {"state_format": "float8", "master_bits": 32},
    "int8, 24 bits of master": {"state_format": "int8", "master_bits": 24},
    "int8, stochastic rounding": {"state_format": "int8", "stochastic_rounding": True},
}


def train(run: str, data: Tensor, size: dict[str, Any], seed: int, steps: int) -> list[float]:
    """Return the loss of every step; the learning rate goes up for 100 steps and down along a cosine."""
    device = data.device
    torch.manual_seed(seed)
    network = GPT(size["depth"], size["width"], 256, size["length"], fused=False).to(device, torch.bfloat16)
    if run == PERTURBED:
        with torch.no_grad():
            for param in network.parameters():
                chosen = torch.rand_like(param, dtype=torch.float32) < 1e-3
                param.copy_(torch.where(chosen, param * (1 + 2.0**-7), param))
    optimizer = FusedAdam(network.parameters(), lr=size["lr"], betas=(0.9, 0.95), weight_decay=0.1, **RUNS[run])

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        logits = network(tokens[:, :-1]).flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    call = graphs.capture(step) if device.type == "cuda" else step
    generator = torch.Generator().manual_seed(seed)
    span = torch.arange(size["length"] + 1, device=device)
    losses = []
    for index in range(steps):
        rate = min((index + 1) / 100, 0.55 + 0.45 * math.cos(math.pi * index / steps))
        for group in optimizer.param_groups:
            group["lr"] = size["lr"] * rate
        first = torch.randint(len(data) - size["length"] - 1, (size["batch"], 1), generator=generator)
        losses.append(call(data[first.to(device) + span].long()).clone())
    return torch.stack(losses).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device, steps = torch.device(arguments.device), 4 if arguments.tiny else 1000
    size = {"depth": 4, "width": 384, "length": 256, "batch": 16, "lr": 1e-3}
    if arguments.tiny:
        size |= {"depth": 1, "width": 64, "length": 32, "batch": 2}
    files = sorted(Path(torch.__file__).parent.rglob("*.py"))
    data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).to(device)
    window = steps // 10 or 1
    curves: dict[str, dict[str, list[float]]] = {}
    for seed in range(1 if arguments.tiny else arguments.seeds):
        start = time.perf_counter()
        for run in RUNS:
            losses = train(run, data, size, seed, steps)
            means = [round(statistics.fmean(losses[at : at + window]), 4) for at in range(0, steps, window)]
            curves.setdefault(f"seed {seed}", {})[run] = means
        ends = {run: means[-1] for run, means in curves[f"seed {seed}"].items()}
        above = {run: f"{end} ({100 * (end / ends['float32'] - 1):+.2f}%)" for run, end in ends.items()}
        print(f"seed {seed}", above, f"{time.perf_counter() - start:.0f} s", flush=True)
    about = f"mean loss of every {window} steps"
    report = {"environment": describe(device), "size": size, "steps": steps, "about": about, "curves": curves}
    output = arguments.output or RESULTS / f"{device_stem(device_name(device))}-state-curves.json"
    if not arguments.tiny:
        output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
