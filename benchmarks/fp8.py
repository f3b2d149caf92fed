"""A GPT in float8 beside bfloat16 and torchao's float8, all compiled, one process per column.

    python benchmarks/fp8.py --limit 300
    python benchmarks/fp8.py --tiny --columns bf16 "apex tensorwise"  # on a CPU, to try the script

Every column trains the same network from the same weights on the same batches: 6 layers of width 4096, 4 x 2048 tokens.
Columns compile side by side, `--at-once` of them, and are timed alone. "everything" adds fused optimizer, norm, loss
and the captured step. "torchao blockwise" is the Float8BlockwiseLinear of torchao's prototypes.

`--curve STEPS` trains a small GPT on the bytes of PyTorch's Python files instead, from several seeds, and notes the
losses. The steps are captured, but not compiled: that would take longer than the steps. Every column of a seed has the
same weights at the start and sees the same bytes. In "bf16 perturbed" a millionth was added to each weight: how far it
is from "bf16" says what of a difference is chance. `--early` ends in the middle of the descent: 4 layers, 16 x 256
tokens a step, PyTorch's default AdamW at 6e-4, no clipping.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from step_models import GPT
from steps import kernels_of
from torch import Tensor, nn

from apex import amp, fp8, graphs
from apex._bench.environment import describe, device_name, device_stem
from apex.optimizers import FusedAdam

RESULTS = Path(__file__).parent / "results"
WINDOW = 20  # steps whose mean loss is noted of a curve
COLUMNS = (
    "bf16",
    "torchao tensorwise",
    "torchao rowwise",
    "torchao blockwise",
    "apex tensorwise",
    "apex rowwise",
    "apex blockwise",
    "apex bf16 everything",
    "apex tensorwise everything",
    "apex rowwise everything",
    "apex blockwise everything",
)
CURVES = (
    "bf16",
    "bf16 perturbed",
    "torchao tensorwise",
    "torchao rowwise",
    "apex tensorwise",
    "apex rowwise",
    "apex blockwise",
    "apex blockwise e5m2",
)


class TorchaoBlockwise(nn.Module):
    """A Float8BlockwiseLinear of torchao, which has no bias, and the bias; its input is cast as autocast casts it."""

    def __init__(self, linear: nn.Linear) -> None:
        from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinear

        super().__init__()
        bias, linear.bias = linear.bias, None
        self.layer, self.bias = Float8BlockwiseLinear.from_float(linear), bias

    def forward(self, input: Tensor) -> Tensor:
        output = self.layer(input.bfloat16())
        return output if self.bias is None else output + self.bias.to(output.dtype)


def prepare(column: str, device: str, size: dict[str, int], seed: int = 0, curve: bool = False) -> tuple[Any, Any]:
    """A training step that takes tokens and returns the loss, and the optimizer; for a `curve`, as GPTs are trained."""
    everything = column.endswith("everything")
    torch.manual_seed(seed)
    network: Any = GPT(size["depth"], size["width"], size["vocabulary"], size["length"], fused=everything).to(device)
    scaling = next((name for name in fp8.SCALINGS if name in column), None)
    options: dict[str, Any] = {"lr": size["lr"] * 1e-6, "weight_decay": 0.01}
    early = bool(size.get("early"))
    if curve:
        options["capturable"] = device == "cuda"
    if curve and not early:
        options |= {"weight_decay": 0.1, "betas": (0.9, 0.95)}
    if column == "bf16 perturbed":
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(1e-6 * torch.randn_like(parameter))
    if everything:
        # Nothing clips gradients here: they may stay in bfloat16.
        optimizer: Any = FusedAdam(network.parameters(), **options, adam_w_mode=True, materialize_master_grads=False)
        network, optimizer = amp.initialize(network, optimizer, opt_level="O5", verbosity=0)
    else:
        optimizer = torch.optim.AdamW(network.parameters(), **options, fused=True)
    if scaling and column.startswith("apex"):
        gradients = "e5m2" if column.endswith("e5m2") else None
        emulate = device == "cpu"
        report = fp8.convert(network.blocks, scaling, smallest_weight=0, gradients=gradients, emulate=emulate)
        assert len(report) == 4 * size["depth"], fp8.table(report)
        assert not any(row.reason for row in report), fp8.table(report)
    elif scaling == "blockwise":
        for module in list(network.blocks.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, TorchaoBlockwise(child))
    elif scaling:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(network.blocks, config=Float8LinearConfig.from_recipe_name(scaling))
    how: dict[str, Any] = {"backend": "aot_eager"} if device == "cpu" else {}
    compiled = network if curve else torch.compile(network, fullgraph=True, **how)

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        if everything:
            loss = compiled(tokens[:, :-1], tokens[:, 1:])
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        else:
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = compiled(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        if curve and not early:
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return (graphs.capture(step) if everything or curve else step), optimizer


def train_curve(column: str, device: str, size: dict[str, int], seed: int, steps: int) -> list[float]:
    """Return the mean loss of every `WINDOW` steps.

    The learning rate goes up for 100 steps and down along a cosine; in an early curve it stays up.
    """
    step, optimizer = prepare(column, device, size, seed, curve=True)
    files = sorted(Path(torch.__file__).parent.rglob("*.py"))
    data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).to(device)
    generator = torch.Generator().manual_seed(seed)
    span = torch.arange(size["length"] + 1, device=device)
    losses = []
    for index in range(steps):
        highest = 1.0 if size.get("early") else 0.55 + 0.45 * math.cos(math.pi * index / steps)
        rate = min((index + 1) / 100, highest)
        for group in optimizer.param_groups:
            group["lr"] = size["lr"] * 1e-6 * rate
        first = torch.randint(len(data) - size["length"] - 1, (size["batch"], 1), generator=generator)
        losses.append(step(data[first.to(device) + span].long()).clone())
    return [round(statistics.fmean(part), 4) for part in torch.stack(losses).view(-1, WINDOW).tolist()]


def text(size: dict[str, int], index: int, device: str) -> Tensor:
    """Tokens with something to learn: each is the one before it plus one of a few steps."""
    generator = torch.Generator().manual_seed(index)
    steps = torch.randint(1, 9, (size["batch"], size["length"] + 1), generator=generator) ** 2
    return (steps.cumsum(1) % size["vocabulary"]).to(device)


def child(column: str, arguments: argparse.Namespace) -> None:
    """One column: a line of JSON when it is warm, then one with its times after a line has come in."""
    size, device = sizes(arguments), arguments.device
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    if arguments.curve:
        for seed in range(arguments.seeds):
            losses = train_curve(column, device, size, seed, arguments.curve)
            amp.shutdown()
            print(json.dumps({f"seed {seed}": losses}), flush=True)
        return
    step, _ = prepare(column, device, size)
    batches = [text(size, index, device) for index in range(4)]
    for index in range(8):
        loss = step(batches[index % 4])
    wait()
    if device == "cuda":  # what warming up and capturing left over is not what training needs
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    print(json.dumps({"loss": float(loss)}), flush=True)
    sys.stdin.readline()
    rounds = []
    for _ in range(arguments.rounds):
        step(batches[0])
        wait()
        start = time.perf_counter()
        for index in range(arguments.steps):
            step(batches[index % 4])
        wait()
        rounds.append(round(1e3 * (time.perf_counter() - start) / arguments.steps, 3))
    answer: dict[str, Any] = {"milliseconds": statistics.median(rounds), "rounds": rounds}
    if device == "cuda":
        answer["mebibytes"] = round(torch.cuda.max_memory_reserved() / 2**20)
    if arguments.kernels:
        answer["kernels"] = kernels_of(lambda: [step(batch) for batch in batches], len(batches))
    print(json.dumps(answer), flush=True)


def against(bf16: dict[str, Any], column: dict[str, Any]) -> dict[str, Any]:
    """The end of each seed's curve, and by how many percent each 100 steps are above bfloat16's of the same seed."""
    if "error" in column:
        return column
    found: dict[str, Any] = {}
    for seed, losses in column.items():
        found[seed] = round(statistics.fmean(losses[-100 // WINDOW :]), 4)
        hundreds = [
            [statistics.fmean(curve[first : first + 100 // WINDOW]) for first in range(0, len(curve), 100 // WINDOW)]
            for curve in (losses, bf16.get(seed, losses))
        ]
        found[f"{seed}, % above"] = [
            round(100 * (mine / theirs - 1), 2) for mine, theirs in zip(*hundreds, strict=True)
        ]
    return found


def sizes(arguments: argparse.Namespace) -> dict[str, int]:
    if arguments.tiny:
        return {"depth": 2, "width": 128, "vocabulary": 256, "length": 32, "batch": 2, "lr": 300}
    if arguments.curve and arguments.early:
        return {"depth": 4, "width": 512, "vocabulary": 256, "length": 256, "batch": 16, "lr": 600, "early": 1}
    if arguments.curve:
        return {"depth": 6, "width": 512, "vocabulary": 256, "length": 256, "batch": 64, "lr": 1000}
    return {"depth": 6, "width": 4096, "vocabulary": 32000, "length": 2048, "batch": 4, "lr": 100}


def start(column: str, arguments: argparse.Namespace) -> tuple[Any, Any]:
    command = [sys.executable, __file__, "--child", column, "--device", arguments.device]
    command += ["--steps", str(arguments.steps), "--rounds", str(arguments.rounds), "--curve", str(arguments.curve)]
    command += ["--seeds", str(arguments.seeds)]
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  open as long as the process runs
    flags = [
        flag
        for flag, on in (("--tiny", arguments.tiny), ("--kernels", arguments.kernels), ("--early", arguments.early))
        if on
    ]
    process = subprocess.Popen(
        [*command, *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
    )
    return process, errors


def listen(process: Any, errors: Any) -> dict[str, Any]:
    line = next((line for line in process.stdout if line.startswith("{")), None)
    if line is not None:
        return json.loads(line)
    errors.seek(0)
    return {
        "error": "\n".join(line for line in errors.read().splitlines() if "frame #" not in line)[-1500:] or "killed"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", nargs="+", choices=sorted({*COLUMNS, *CURVES}), help="all of them by default")
    parser.add_argument("--steps", type=int, default=5, help="steps per round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=2, help="columns that compile together; they share the memory")
    parser.add_argument("--curve", type=int, default=0, help="steps of a small GPT whose losses are noted")
    parser.add_argument("--early", action="store_true", help="a curve that ends while the loss still falls")
    parser.add_argument("--seeds", type=int, default=3, help="of a curve")
    parser.add_argument("--kernels", action="store_true", help="note the kernels of a step too, on a GPU")
    parser.add_argument("--limit", type=float, default=86400.0, help="seconds after which no column begins")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--output", type=Path, help="the result file; by default one in benchmarks/results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments)
        return
    columns = arguments.columns or list(CURVES if arguments.curve else COLUMNS)
    deadline = time.monotonic() + arguments.limit
    device = torch.device(arguments.device)
    path = arguments.output or RESULTS / f"{device_stem(device_name(device))}-fp8.json"
    key = ("early curve" if arguments.early else "curve") if arguments.curve else "steps"
    results: dict[str, dict[str, Any]] = {}
    for first in range(0, len(columns), arguments.at_once):
        if time.monotonic() > deadline:
            break
        running = {name: start(name, arguments) for name in columns[first : first + arguments.at_once]}
        # A line of each when it is warm, or has trained the first seed; then its times, one column after the other, or
        # its other seeds.
        for turn in range(arguments.seeds if arguments.curve else 2):
            for name, (process, errors) in running.items():
                if "error" in results.get(name, {}):
                    continue
                if turn and not arguments.curve:
                    process.stdin.write("\n")
                    process.stdin.flush()
                results.setdefault(name, {}).update(listen(process, errors))
                known = json.loads(path.read_text()) if path.exists() else {}
                known[key] = {**describe(device), "size": sizes(arguments), "columns": results}
                path.write_text(json.dumps(known, indent=1) + "\n")
        for name, (process, _) in running.items():
            process.kill()
            shown = {head: value for head, value in results[name].items() if head != "kernels"}
            print(name, against(results.get("bf16", {}), shown) if arguments.curve else shown, flush=True)


if __name__ == "__main__":
    main()
