"""Whole training steps in mixed precision: apex.amp beside torch.amp.

    python benchmarks/amp.py --output benchmarks/results/nvidia_h200-amp.json
    python benchmarks/amp.py --device cpu --output benchmarks/results/cpu-amp.json

Every contender is a process of its own, because amp's casts are switched on for a whole process. All of them are
started and warmed up first; then they take turns for several rounds, one at a time, so that a drift of the machine hits
all alike. On a CPU all of that is done several times. A figure is the median over all rounds.
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
from typing import Any

import torch
from amp_models import IMAGES, MODELS, problem
from torch import nn

# How each prepares model and optimizer is in `prepare`.
CONTENDERS = (
    "fp32",
    "autocast fp16",
    "autocast bf16",
    "torch.amp fp16",
    "apex O1 torch optimizer",
    "apex O1 fused optimizer",
    "apex O2 fused optimizer",
    "apex O2 fused optimizer + groupbn",
    "apex O2 fused optimizer + half outputs",
    "torch.amp bf16",
    "apex O4 torch optimizer",
    "apex O4 fused optimizer",
    "apex O5 fused optimizer",
)
# What a device's figures are about: on a GPU speed and memory, on a CPU what amp costs on top of autocast.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "models": ["resnet50-256", "resnet50", "resnet50-32", "gpt2"],
        "contenders": [
            name for name in CONTENDERS if not name.startswith("autocast") and name != "apex O4 torch optimizer"
        ],
        "processes": 1,
        "rounds": 5,
        "steps": 10,
    },
    "cpu": {
        "models": ["demo-gpt", "demo-conv"],
        "contenders": [
            "autocast fp16",
            "torch.amp fp16",
            "apex O1 torch optimizer",
            "autocast bf16",
            "torch.amp bf16",
            "apex O4 torch optimizer",
        ],
        "processes": 5,  # from one to the other the same program differs by 4%
        "rounds": 5,
        "steps": 5,
    },
}
# Which models a variant is about: fused batch norms, or outputs that are large.
VARIANTS = {"groupbn": tuple(IMAGES), "half outputs": ("gpt2",)}
# All of a model's contenders are on the GPU at once: of one that takes 12 GB, only those in float16.
LARGE = ("resnet50-256",)
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


def optimizer_for(name: str, model: nn.Module, fused_by_apex: bool) -> torch.optim.Optimizer:
    """SGD for networks of images, AdamW for the others."""
    from apex.optimizers import FusedAdam, FusedSGD

    if name in (*IMAGES, "demo-conv"):
        options = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
        kind = FusedSGD if fused_by_apex else torch.optim.SGD
        return kind(model.parameters(), **options, **({} if fused_by_apex else {"fused": True}))
    if fused_by_apex:
        return FusedAdam(model.parameters(), lr=1e-4, weight_decay=0.01)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)


def prepare(contender: str, name: str, device: str, small: bool) -> tuple[Callable[[], None], float]:
    """A training step, and how long amp.initialize took in milliseconds."""
    half_outputs = contender.endswith("+ half outputs")
    model, inputs, targets, criterion = problem(
        name, device, small, fused_norms=contender.endswith("+ groupbn"), half_outputs=half_outputs
    )
    optimizer = optimizer_for(name, model, "fused optimizer" in contender)
    if contender == "fp32":

        def plain_step() -> None:
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()

        return plain_step, 0.0
    half = half_of(contender)
    if contender.startswith("autocast"):

        def bare_step() -> None:
            optimizer.zero_grad()
            with torch.autocast(device, dtype=half):
                loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()

        return bare_step, 0.0
    if contender.startswith("torch.amp"):
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

    level = contender.split()[1]
    options: dict[str, Any] = {"cast_model_outputs": torch.float16} if half_outputs else {}
    start = time.perf_counter()
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    milliseconds = 1e3 * (time.perf_counter() - start)

    def apex_step() -> None:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    return apex_step, milliseconds


def compete(contender: str, name: str, device: str, small: bool, steps: int) -> None:
    """One contender: a line of JSON when it is warm, one for every line that comes in, and one at the end."""
    step, initialize = prepare(contender, name, device, small)
    on_gpu = device == "cuda"
    wait = torch.cuda.synchronize if on_gpu else (lambda: None)
    clock = clock_of(device)
    for _ in range(5):
        step()
    wait()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    _say({"initialize_milliseconds": initialize})
    for _ in sys.stdin:
        step()
        wait()
        at_once = steps if on_gpu else 1  # a GPU is asked for many steps at once, and not kept waiting
        times, host_times = [], []
        for _ in range(steps // at_once):
            start = clock()
            for _ in range(at_once):
                step()
            host_times.append(1e3 * (clock() - start) / at_once)
            wait()
            times.append(1e3 * (clock() - start) / at_once)
        _say({"milliseconds": statistics.median(times), "host_milliseconds": statistics.median(host_times)})
    _say({**memory(), "waits_for_the_gpu": waits(step)} if on_gpu else {})


def memory() -> dict[str, float]:
    """The most that tensors took, and what they asked for, which the allocator rounds up as its blocks happen to be."""
    asked = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    return {"peak_mebibytes": torch.cuda.max_memory_allocated() / 2**20, "asked_mebibytes": asked / 2**20}


def clock_of(device: str) -> Callable[[], float]:
    """Seconds; on a CPU those of one thread, the only one, so that other work of the machine does not count."""
    if device == "cuda":
        return time.perf_counter
    torch.set_num_threads(1)
    return time.thread_time


def _say(document: dict[str, Any]) -> None:
    print(json.dumps(document), flush=True)


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


def initialize_times(device: str) -> None:
    """How long amp.initialize takes for a model of 300 tensors, at every level: the median of 5."""
    from apex import amp
    from apex.optimizers import FusedAdam

    clock = clock_of(device)
    found = {}
    for level in LEVELS:
        times = []
        for _ in range(6):
            model, *_ = problem("layers", device, small=False)
            optimizer = FusedAdam(model.parameters())
            start = clock()
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
            times.append(1e3 * (clock() - start))
            amp.shutdown()
        found[level] = statistics.median(times[1:])  # the first one of a process loads modules
    _say({"tensors": len(list(model.parameters())), "milliseconds": found})


def takes_part(contender: str, model: str) -> bool:
    """Whether a contender is about this model."""
    if model in LARGE and (contender == "fp32" or half_of(contender) == torch.bfloat16):
        return False
    return model in VARIANTS.get(contender.partition(" + ")[2], MODELS)


def half_of(contender: str) -> torch.dtype:
    """Its half precision; the one of fp32 does not matter."""
    return torch.bfloat16 if any(mark in contender for mark in ("bf16", "O4", "O5")) else torch.float16


class Contender:
    """A process that trains when it is told to."""

    def __init__(self, name: str, model: str, arguments: argparse.Namespace) -> None:
        self.name = name
        command = [sys.executable, __file__, "--child", name, "--models", model, "--device", arguments.device]
        command += ["--steps", str(arguments.steps), *(["--small"] if arguments.small else [])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.rounds: list[float] = []
        self.host: list[float] = []

    def answer(self) -> dict[str, Any]:
        """The next line that it says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} failed:\n{self._process.communicate()[1][-2000:]}")
        return json.loads(line)

    def run_round(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self.answer()
        self.rounds.append(answer["milliseconds"])
        self.host.append(answer["host_milliseconds"])

    def end(self) -> dict[str, Any]:
        """What it knows after the last round."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        last = self.answer()
        self._process.wait()
        return last


def run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every model and every contender."""
    results: dict[str, dict[str, Any]] = {}
    for model in arguments.models:
        names = [name for name in arguments.contenders if takes_part(name, model)]
        rounds, host = ({name: [] for name in names} for _ in range(2))
        known: dict[str, dict[str, Any]] = {}
        for _ in range(arguments.processes):
            contenders = [Contender(name, model, arguments) for name in names]
            known = {contender.name: contender.answer() for contender in contenders}
            for _ in range(arguments.rounds):
                for contender in contenders:
                    contender.run_round()
            for contender in contenders:
                known[contender.name] |= contender.end()
                rounds[contender.name] += contender.rounds
                host[contender.name] += contender.host
        results[model] = {
            name: {
                "milliseconds": statistics.median(rounds[name]),
                "host_milliseconds": statistics.median(host[name]),
                **known[name],
                "rounds": [round(value, 3) for value in rounds[name]],
            }
            for name in names
        }
        compare(results[model])
        print_table(model, results[model])
    command = [sys.executable, __file__, "--child", "initialize", "--device", arguments.device]
    initialize = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"amp.initialize of {initialize['tensors']} tensors, ms: {initialize['milliseconds']}")
    on_gpu = arguments.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "processes": arguments.processes,
        "rounds_per_process": arguments.rounds,
        "steps_per_round": arguments.steps,
        "method": "contenders take turns, one round each at a time; a round is "
        + (
            "the mean of steps without a wait between them"
            if on_gpu
            else "the median of its steps, in the time of the one thread that works"
        )
        + ", a figure the median of the rounds; host_milliseconds: until the steps were queued",
        "results": results,
        "initialize": initialize,
    }


def compare(results: dict[str, dict[str, Any]]) -> None:
    """Adds how long each takes beside torch.amp, and beside autocast alone: the median over pairs of the same round."""
    for name, figures in results.items():
        half = "bf16" if half_of(name) == torch.bfloat16 else "fp16"
        for rival in (f"torch.amp {half}", f"autocast {half}"):
            if rival in results and rival != name:
                pairs = zip(figures["rounds"], results[rival]["rounds"], strict=True)
                figures[f"times {rival}"] = round(statistics.median(mine / theirs for mine, theirs in pairs), 4)


def print_table(model: str, results: dict[str, dict[str, Any]]) -> None:
    """Milliseconds of each contender, and what else is known."""
    for name, figures in results.items():
        line = f"{model:12} {name:39} {figures['milliseconds']:8.3f} ms, host {figures['host_milliseconds']:7.3f}"
        if "peak_mebibytes" in figures:
            line += f", {figures['peak_mebibytes']:.0f} MiB ({figures['asked_mebibytes']:.0f} asked for)"
            line += ", waits" if figures["waits_for_the_gpu"] else ""
        ratios = [f"{value:.3f} {key}" for key, value in figures.items() if key.startswith("times ")]
        print("; ".join([line, *ratios]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=list(DEFAULTS))
    parser.add_argument("--steps", type=int, help="steps per round")
    parser.add_argument("--rounds", type=int, help="how often the contenders take turns")
    parser.add_argument("--processes", type=int, help="how often they do so in new processes")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name, value in DEFAULTS[arguments.device].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.child == "initialize":
        initialize_times(arguments.device)
    elif arguments.child:
        compete(arguments.child, arguments.models[0], arguments.device, arguments.small, arguments.steps)
    else:
        report = run_all(arguments)
        if arguments.output:
            arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
