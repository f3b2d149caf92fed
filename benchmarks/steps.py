"""Whole training steps: apex O5, captured and compiled, beside torch.amp and torch.compile.

    python benchmarks/steps.py --models gpt-6x384 resnet50 --limit 550
    python benchmarks/steps.py --tiny --models llama --columns torch.amp O5  # on a CPU, to try the script

Every column is a process of its own, which trains the same network from the same weights on the same four batches with
AdamW. Each warms up, compiling and capturing, `--at-once` of them together; its loss after `--warmup` steps is noted.
When all columns of a model are warm they take turns, one round each at a time, so that a drift of the machine hits all
alike; those of later models, which may still be compiling, are stopped meanwhile. A figure is the median of the rounds.
The memory of the device must do for a model's columns and `--at-once` more.

Memory is what the process holds of the device while it trains, after what warming up left over was given back: the
blocks of a captured graph count, which `max_memory_allocated` does not see when it is replayed.

The result file is written after every column and every round, and keeps what it has of other models.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from step_models import PROBLEMS, Batch, problem, step_loss
from torch import Tensor

from apex import amp, graphs
from apex._bench.environment import describe, device_name, device_stem
from apex.optimizers import FusedAdam

Step = Callable[..., Tensor]


class Kind(NamedTuple):
    """`mode` is torch.compile's, None where nothing is compiled."""

    ours: bool
    mode: str | None = None
    graph: bool = False


COLUMNS = {
    "torch.amp": Kind(ours=False),
    "compile": Kind(ours=False, mode="default"),
    "reduce-overhead": Kind(ours=False, mode="reduce-overhead"),
    "O5": Kind(ours=True),
    "O5+graph": Kind(ours=True, graph=True),
    "O5+compile": Kind(ours=True, mode="default"),
    "O5+compile+graph": Kind(ours=True, mode="default", graph=True),
    # Last, because tuning takes minutes.
    "max-autotune": Kind(ours=False, mode="max-autotune"),
    "max-autotune-no-cudagraphs": Kind(ours=False, mode="max-autotune-no-cudagraphs"),
    "O5+max-autotune+graph": Kind(ours=True, mode="max-autotune-no-cudagraphs", graph=True),
}
KERNELS = 60  # that are noted of a column
RESULTS = Path(__file__).parent / "results"


def prepare(column: str, model: str, device: str, tiny: bool) -> tuple[Step, list[Batch]]:
    """A training step that takes a batch and returns the loss, and the batches."""
    kind = COLUMNS[column]
    torch.backends.cudnn.benchmark = True
    network, batches = problem(model, device, kind.ours, tiny)
    options: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.01}
    if kind.ours:
        step = _apex_step(network, kind, options, tiny, model)
    else:
        step = _torch_step(network, kind, options, device, tiny, model)
    return (graphs.capture(step) if kind.graph else step), batches


def _compiled(network: torch.nn.Module, mode: str | None, tiny: bool) -> Any:
    if mode is None:
        return network
    # Generated C++ takes longer to build than a test may. A graph break would be an error: none is timed unseen.
    how: dict[str, Any] = {"backend": "aot_eager"} if tiny else {"mode": mode}
    if mode.startswith("max-autotune") and not tiny:
        # Coordinate descent compiles every kernel dozens of times, which takes ten minutes and more of a ResNet-50.
        how = {"options": torch._inductor.list_mode_options(mode) | {"coordinate_descent_tuning": False}}
    return torch.compile(network, fullgraph=True, **how)


def _torch_step(
    network: torch.nn.Module, kind: Kind, options: dict[str, Any], device: str, tiny: bool, model: str = ""
) -> Step:
    optimizer = torch.optim.AdamW(network.parameters(), **options, fused=True)
    loss_of = step_loss(model, _compiled(network, kind.mode, tiny), fused=False)

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _apex_step(network: torch.nn.Module, kind: Kind, options: dict[str, Any], tiny: bool, model: str = "") -> Step:
    # Nothing clips gradients here: they may stay in bfloat16.
    optimizer = FusedAdam(network.parameters(), **options, adam_w_mode=True, materialize_master_grads=False)
    # A loss is float32 as it is; logits, for a loss that computes in float32 itself, stay as large as they are.
    outputs = torch.bfloat16 if model.endswith("-logits") else None
    network, optimizer = amp.initialize(network, optimizer, opt_level="O5", verbosity=0, cast_model_outputs=outputs)
    loss_of = step_loss(model, _compiled(network, kind.mode, tiny), fused=True)

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(*batch)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        return loss.detach()

    return step


def compete(column: str, model: str, arguments: argparse.Namespace, prepare: Callable[..., Any] = prepare) -> None:
    """One column: a line of JSON when it is warm, then one for every line that comes in."""
    device = arguments.device
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    start = time.perf_counter()
    step, batches = prepare(column, model, device, arguments.tiny)
    count = len(batches)
    loss = torch.empty(0)
    for index in range(arguments.warmup):
        loss = step(*batches[index % count])
    if reason := getattr(step, "reason", None):
        raise SystemExit(f"not captured: {reason}")
    known: dict[str, Any] = {"loss": float(loss), "warm_up_seconds": round(time.perf_counter() - start, 1)}
    del loss
    if device == "cuda":
        known["allocated_mebibytes"] = round(torch.cuda.max_memory_allocated() / 2**20)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    print(json.dumps(known), flush=True)
    for line in sys.stdin:
        if line.strip() == "kernels":
            print(json.dumps({"kernels": kernels_of(lambda: [step(*batch) for batch in batches], count)}), flush=True)
            continue
        step(*batches[0])
        wait()
        start = time.perf_counter()
        for index in range(arguments.steps):
            step(*batches[index % count])
        wait()
        answer = {"milliseconds": 1e3 * (time.perf_counter() - start) / arguments.steps}
        if device == "cuda":
            answer["mebibytes"] = round(torch.cuda.max_memory_reserved() / 2**20)
        print(json.dumps(answer), flush=True)


def kernels_of(run: Callable[[], Any], steps: int) -> dict[str, list[float]]:
    """The kernels that take most of the GPU's time, behind the sums of all: how often each runs in a step, and
    microseconds of all its runs."""
    from torch.profiler import ProfilerActivity, profile

    run()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            counted = found.setdefault(event.name[:100], [0.0, 0.0])
            counted[0] += 1 / steps
            counted[1] += event.device_time / steps
    ranked = sorted(found.items(), key=lambda item: -item[1][1])
    all_of_them = ("all", [sum(column) for column in zip(*found.values(), strict=True)])
    return {name: [round(runs, 2), round(time_, 1)] for name, (runs, time_) in (all_of_them, *ranked[:KERNELS])}


class Column:
    """A process of a script that trains when it is told to, and its figures so far."""

    def __init__(self, name: str, model: str, arguments: argparse.Namespace) -> None:
        script = getattr(arguments, "script", __file__)
        command = [sys.executable, script, "--child", name, "--models", model, "--device", arguments.device]
        command += ["--steps", str(arguments.steps), "--warmup", str(arguments.warmup)]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  open as long as the process runs
        self._process = subprocess.Popen(
            [*command, *(["--tiny"] if arguments.tiny else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # signals reach those that it compiles with too
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.rounds: list[float] = []
        self.figures: dict[str, Any] = {}

    def _read(self) -> None:
        """Queues what the process says, and None behind it: reading from a pipe has no time limit of its own."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put(None)

    @property
    def runs(self) -> bool:
        return "error" not in self.figures

    def listen(self, deadline: float) -> dict[str, Any]:
        """What it says next, also noted in `figures`; an error where it says nothing before the deadline."""
        try:
            line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            self.signal(signal.SIGKILL)
            answer = {"error": "out of time"}
        else:
            self._errors.seek(0)
            answer = {"error": self._errors.read()[-2000:]} if line is None else json.loads(line)
        self.figures |= answer
        return answer

    def run_round(self, deadline: float, what: str = "") -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # of a process that has ended, which `listen` notes
            self._process.stdin.write(f"{what}\n")
            self._process.stdin.flush()
        answer = self.listen(deadline)
        if "milliseconds" in answer:
            self.rounds.append(round(answer["milliseconds"], 4))
            self.figures |= {"milliseconds": statistics.median(self.rounds), "rounds": self.rounds}

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # giving back a device's memory takes seconds at times
            self._process.wait(5)


def measure(arguments: argparse.Namespace, deadline: float, note: Callable[[str, dict[str, Any]], None]) -> None:
    """All columns of all models; `note` is told a model and its figures whenever there are new ones."""
    asked = {
        model: [name for name in arguments.columns if f"{model}:{name}" not in arguments.without]
        for model in arguments.models
    }
    pairs = [(model, name) for model, names in asked.items() for name in names]
    warm_by = time.monotonic() + arguments.warm_limit
    columns: dict[tuple[str, str], Column] = {}

    def tell(model: str) -> None:
        note(model, {name: column.figures for (of, name), column in columns.items() if of == model and column.figures})

    try:
        for model, names in asked.items():
            for name in names:
                if time.monotonic() >= deadline:
                    return
                index = pairs.index((model, name))
                for ahead in pairs[index : index + arguments.at_once]:
                    if ahead not in columns:
                        columns[ahead] = Column(ahead[1], ahead[0], arguments)
                # Of a later model columns were stopped, and may want to say that they are warm.
                columns[model, name].listen(min(deadline, max(warm_by, time.monotonic() + 2)))
                tell(model)
            mine = [columns[model, name] for name in names]
            others = [column for column in columns.values() if column not in mine]
            for column in others:
                column.signal(signal.SIGSTOP)
            profiled = [columns[model, name] for name in names if name in arguments.kernels]
            for what, those in [("", mine)] * arguments.rounds + [("kernels", profiled)]:
                for column in those:
                    if column.runs and time.monotonic() < deadline:
                        column.run_round(deadline, what)
                tell(model)
            for column in others:
                column.signal(signal.SIGCONT)
            for column in mine:
                column.end()
    finally:
        for column in columns.values():
            column.end()


def write(path: Path, environment: dict[str, Any], settings: dict[str, Any], results: dict[str, Any]) -> None:
    """The result file, which keeps what it has of other models."""
    known = json.loads(path.read_text())["models"] if path.exists() else {}
    for model, columns in results.items():
        known[model] = {**environment, "settings": settings, "columns": columns}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"models": known}, indent=1) + "\n")
    temporary.replace(path)


def print_tables(results: dict[str, dict[str, Any]]) -> None:
    """Per model: each column, and its time and memory beside the quickest and the smallest of torch's."""
    from apex._cli.console import make_console, make_table, print_table

    console = make_console()
    for model, columns in results.items():
        timed = {name: figures for name, figures in columns.items() if "milliseconds" in figures}
        of_torch = [figures for name, figures in timed.items() if not COLUMNS[name].ours]
        quickest = min(of_torch, key=lambda figures: figures["milliseconds"], default=None)
        table = make_table(
            console, model, "column", *(heads := ("ms", "min", "max", "x torch", "MiB", "x MiB", "loss")), right=heads
        )
        for name, figures in columns.items():
            if name not in timed:
                table.add_row(name, (figures.get("error") or "-").strip().splitlines()[-1])
                continue
            cells = [f"{figures['milliseconds']:.2f}", *(f"{end(figures['rounds']):.2f}" for end in (min, max))]
            for key, text in (("milliseconds", ""), ("mebibytes", f"{figures.get('mebibytes', '-')}")):
                ratio = f"{figures[key] / quickest[key]:.2f}" if quickest and key in figures else "-"
                cells += [text, ratio] if text else [ratio]
            table.add_row(name, *cells, f"{figures['loss']:.4f}")
        print_table(console, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--steps", type=int, default=20, help="steps per round")
    parser.add_argument("--rounds", type=int, default=7, help="how often the columns take turns")
    parser.add_argument("--warmup", type=int, default=20, help="steps before them, after which the loss is noted")
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        help="columns that warm up together: quicker, and noisier where torch.compile tunes",
    )
    parser.add_argument(
        "--kernels", nargs="*", default=[], choices=COLUMNS, help="columns whose kernels are noted, by the GPU's time"
    )
    parser.add_argument("--limit", type=float, default=86400.0, help="seconds after which nothing more is measured")
    parser.add_argument(
        "--warm-limit", type=float, default=86400.0, help="seconds from the start that slow columns are waited for"
    )
    parser.add_argument("--without", nargs="*", default=[], metavar="MODEL:COLUMN", help="columns to leave out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--output", type=Path, help="the result file; by default one in benchmarks/results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        compete(arguments.child, arguments.models[0], arguments)
        return
    deadline = time.monotonic() + arguments.limit
    device = torch.device(arguments.device)
    path = arguments.output or RESULTS / f"{device_stem(device_name(device))}-steps.json"
    settings = {name: getattr(arguments, name) for name in ("steps", "rounds", "warmup", "at_once", "tiny")}
    environment, results = describe(device), {}

    def note(model: str, columns: dict[str, Any]) -> None:
        results[model] = columns
        write(path, environment, settings, results)

    measure(arguments, deadline, note)
    print_tables(results)


if __name__ == "__main__":
    main()
