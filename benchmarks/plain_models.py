"""Plain models, nothing in them written for apex: a step by PyTorch's ways, Liger-Kernel's, and `apex.boost` alone.

    python benchmarks/plain_models.py                        # every row, on a GPU
    python benchmarks/plain_models.py --rows vit_b16 gpt2 --output vit.json
    python benchmarks/plain_models.py --tiny --device cpu --rows gpt2 --columns "torch.amp" "apex.boost"

Forward, backward and AdamW in bfloat16. "by hand" is what a user puts together of our parts: `apex.fuse` of the model,
FusedAdam and O5 of `apex.amp`, as it is, in `apex.graphs.capture`, or with model and loss compiled in it; the quickest
of the three is chosen by a few steps of each, which the result has as "report".

All columns of a row are made in one process and are warm before the first is
timed; they are timed in turns. If the next column does not fit into memory, those before it are timed and freed first;
`turn` numbers the columns that were timed together. `ms` is the median over rounds. `MiB` is the most memory that
PyTorch reserved for the column while it ran steps alone, with its weights, state and graphs; `pools` splits it into
memory outside and inside of graphs, each as MiB reserved and MiB in use between steps; `MiB` is null if memory of a
column before was freed meanwhile. `first_step_s` is the
seconds from the model to the end of the first step, and `first_s` to the end of the warm-up: what is compiled, and for
apex.boost also the measuring. The file has all rounds, the losses of the first steps, the report of apex.boost, and
the floor of each row (`plain_floor.py`). Rows of earlier runs stay in it; "run" says when and with which commit a row
was measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from plain_floor import floor, rates
from plain_networks import ROWS, Row
from torch import Tensor

import apex
from apex._bench.environment import describe, device_name, device_stem
from apex._installed import installed_version

RESULTS = Path(__file__).parent / "results"
COLUMNS = ("torch.amp", "compile", "reduce-overhead", "liger", "by hand", "apex.boost", "apex.boost fp8")


class LigerPatch:
    """The patch of a model by Liger-Kernel; functions that it replaces for all models are replaced inside of it only.

    The patch exchanges functions of the module that defines the model, which other columns use as they were.
    """

    def __init__(self, name: str, model: Any) -> None:
        import liger_kernel.transformers

        self._functions = vars(sys.modules[type(model).__module__])
        self._before = dict(self._functions)
        getattr(liger_kernel.transformers, name)(model=model)
        self._after = dict(self._functions)
        self.__exit__()

    def __enter__(self) -> None:
        self._functions.update(self._after)

    def __exit__(self, *error: object) -> None:
        self._functions.update(self._before)


class Column:
    """One way to train a row's model."""

    def __init__(self, row: Row, column: str, arguments: argparse.Namespace, batch: tuple[Tensor, ...]) -> None:
        begin, self.batch, self.is_gpu = time.perf_counter(), batch, arguments.device == "cuda"
        self.base, self.base_pools = self._reserved(), pools()
        torch.manual_seed(0)
        if column == "liger" and not row.liger:
            raise LookupError("Liger-Kernel has no patch for this model")
        model = make_model(row, arguments)
        self.report: Callable[[], Any] | None = None
        warmup = 24 if column.startswith("apex") and self.is_gpu else 4  # apex.boost measures three variants
        variants = self._variants(row, column, model, arguments.tiny)
        self.step = next(iter(variants.values()))
        self.losses = [float(self.step(*batch))]
        self.first_step = time.perf_counter() - begin
        self.losses += [float(self.step(*batch)) for _ in range(warmup - 1)][:3]
        if len(variants) > 1:
            self._choose(variants)
        del variants  # steps that were not chosen hold graphs
        if self.is_gpu:
            torch.cuda.synchronize()
        self.first = time.perf_counter() - begin
        self.mebibytes = self._memory()
        self.pools = {
            name: [a - b for a, b in zip(now, self.base_pools[name], strict=True)] for name, now in pools().items()
        }
        if any(reserved < 0 for reserved, _ in self.pools.values()):
            self.mebibytes = None  # memory of a column before was freed meanwhile
        self.times: list[float] = []

    def _variants(self, row: Row, column: str, model: Any, tiny: bool) -> dict[str, Callable[..., Tensor]]:
        """Return the steps of a column by name, of which the quickest counts."""
        if column == "by hand":
            return self._by_hand(row, model, tiny)
        return {column: (self._boosted if column.startswith("apex") else self._torch)(row, column, model)}

    def _choose(self, variants: dict[str, Callable[..., Tensor]]) -> None:
        """Time a few steps of each variant and keep the quickest."""
        milliseconds, reason = dict[str, float](), ""
        for name, self.step in variants.items():
            for _ in range(4):  # three eager steps and a capture
                self.step(*self.batch)
            self.times = []
            for _ in range(3):
                self.time(1)
            milliseconds[name] = statistics.median(self.times)
            if isinstance(self.step, apex.graphs.CapturedStep):
                reason = f"it cannot be captured: {self.step.reason}" if self.step.reason else reason
                self.step.invalidate()  # the next variant needs the memory of its graphs
        best = min(milliseconds, key=milliseconds.__getitem__)
        self.step = variants[best]
        for _ in range(4):
            self.step(*self.batch)
        times = ", ".join(f"{name} {each:.2f} ms" for name, each in milliseconds.items())
        self.report = lambda: f"chosen     {best} ({times}) {reason}".rstrip()

    def _by_hand(self, row: Row, model: Any, tiny: bool) -> dict[str, Callable[..., Tensor]]:
        apex.fuse(model, verbose=False)
        plain: Any = apex.optimizers.FusedAdam(
            model.parameters(), lr=1e-4, weight_decay=0.01, materialize_master_grads=False
        )
        model, optimizer = apex.amp.initialize(model, plain, opt_level="O5", verbosity=0)

        def loss(*batch: Tensor) -> Tensor:
            return row.loss(model, *batch)

        def trained_by(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def train_step(*batch: Tensor) -> Tensor:
                value = loss(*batch)
                with apex.amp.scale_loss(value, optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
                optimizer.zero_grad()
                return value.detach()

            return train_step

        # Compiling a tiny model for a CPU would take longer than all else.
        compiled = torch.compile(loss, dynamic=False, **({"backend": "aot_eager"} if tiny else {}))
        captures = {"captured": loss, "compiled and captured": compiled}
        steps = {name: apex.graphs.capture(trained_by(each)) for name, each in captures.items()}
        return {"eager": trained_by(loss), **steps}

    def _boosted(self, row: Row, column: str, model: Any) -> Callable[..., Tensor]:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
        precision = "fp8" if column.endswith("fp8") else "bf16"
        model, optimizer, step = apex.boost(model, optimizer, precision, device=self.batch[0].device)

        @step
        def train_step(*batch: Tensor) -> Tensor:
            loss = row.loss(model, *batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        self.report = step.report
        return train_step

    def _torch(self, row: Row, column: str, model: Any) -> Callable[..., Tensor]:
        in_half = column == "liger"  # its usual way: bfloat16 weights
        patched: Any = nullcontext()
        if in_half:
            model = model.bfloat16()
            patched = LigerPatch(row.liger, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        device = self.batch[0].device.type

        def loss(*batch: Tensor) -> Tensor:
            if in_half:
                with patched:
                    return row.loss(model, *batch)
            with torch.autocast(device, torch.bfloat16):
                return row.loss(model, *batch)

        if column == "compile":
            loss = torch.compile(loss)
        elif column == "reduce-overhead":
            loss = torch.compile(loss, mode="reduce-overhead")

        def train_step(*batch: Tensor) -> Tensor:
            value = loss(*batch)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value.detach()

        return train_step

    @staticmethod
    def _reserved() -> int:
        if not torch.cuda.is_available():
            return 0
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def _memory(self) -> int | None:
        if not self.is_gpu:
            return None
        self._reserved()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            self.step(*self.batch)
        torch.cuda.synchronize()
        return round((torch.cuda.max_memory_reserved() - self.base) / 2**20)

    def time(self, steps: int) -> None:
        """Time some steps; a step before them brings the device back to this column."""
        self.step(*self.batch)
        if self.is_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(steps):
                self.step(*self.batch)
            end.record()
            end.synchronize()
            self.times.append(begin.elapsed_time(end) / steps)
        else:
            start = time.perf_counter()
            for _ in range(steps):
                self.step(*self.batch)
            self.times.append(1e3 * (time.perf_counter() - start) / steps)

    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = {"ms": round(statistics.median(self.times), 3), "MiB": self.mebibytes}
        result |= {"pools": self.pools} if self.is_gpu else {}
        result |= {"first_step_s": round(self.first_step, 1), "first_s": round(self.first, 1)}
        result["losses"] = [round(loss, 4) for loss in self.losses]
        result["rounds"] = [round(each, 3) for each in self.times]
        return result if self.report is None else {**result, "report": str(self.report())}

    def profile(self) -> str:
        """Return the longest kernels of two steps."""
        activities = [torch.profiler.ProfilerActivity.CUDA if self.is_gpu else torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(2):
                self.step(*self.batch)
            if self.is_gpu:
                torch.cuda.synchronize()
        kind = "device_time_total" if self.is_gpu else "cpu_time_total"
        events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, kind))
        lines = [f"{getattr(each, kind) / 2e3:9.3f} ms {each.count // 2:5}  {each.key[:150]}" for each in events[:45]]
        return "\n".join(lines)


def pools() -> dict[str, list[int]]:
    """Return the MiB that PyTorch has reserved, and those in use, outside and inside of graphs."""
    found = {"outside": [0, 0], "graphs": [0, 0]}
    for segment in torch.cuda.memory_snapshot() if torch.cuda.is_available() else ():
        name = "outside" if tuple(segment["segment_pool_id"]) == (0, 0) else "graphs"
        for index, key in enumerate(("total_size", "allocated_size")):
            found[name][index] += segment[key]
    return {name: [size >> 20 for size in sizes] for name, sizes in found.items()}


def make_model(row: Row, arguments: argparse.Namespace) -> Any:
    """Return the row's model on the device."""
    layout = torch.channels_last if row.has_images else torch.contiguous_format
    with torch.device(arguments.device):  # billions of random numbers take long on the host
        return (row.tiny if arguments.tiny else row.make)().to(memory_format=layout).train()


class Turns:
    """The columns of a row that are in memory, and the results of those that were."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.results: dict[str, dict[str, Any]] = {}
        self.columns: dict[str, Column] = {}
        self.profiles: dict[str, str] = {}
        self._arguments, self._turn = arguments, 0

    def add(self, column: str, make: Callable[[], Column]) -> None:
        """Make a column. If it does not fit, time and free the columns that are there first."""
        if self._arguments.alone:
            self.finish()
        try:
            try:
                self.columns[column] = make()
                return
            except torch.OutOfMemoryError:
                if not self.columns:
                    raise
            self.finish()
            self.columns[column] = make()
        except Exception as error:  # a column without its package, or without memory, is no reason to stop
            self.results[column] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}

    def finish(self) -> None:
        """Time the columns in turns and free them."""
        for _ in range(self._arguments.rounds):
            for column in self.columns:
                self.columns[column].time(self._arguments.steps)
        for column in self.columns:  # no name is left for a column, which would keep it in memory
            self.results[column] = {**self.columns[column].result(), "turn": self._turn}
            if self._arguments.profile:
                self.profiles[column] = self.columns[column].profile()
        self._turn += bool(self.columns)
        self.columns = {}
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measure(name: str, arguments: argparse.Namespace, rate: dict[str, float]) -> dict[str, Any]:
    """Return the results of a row by column, and its floor; a column that fails has its error."""
    row, turns = ROWS[name], Turns(arguments)
    torch.manual_seed(0)
    if torch.cuda.is_available():  # a batch in a freed block of `rates` keeps the block: columns would reserve less
        torch.cuda.empty_cache()
    draw = row.tiny_draw if arguments.tiny else row.draw
    layout = torch.channels_last if row.has_images else torch.contiguous_format
    batch = tuple(
        tensor.to(arguments.device, memory_format=layout if tensor.dim() == 4 else torch.preserve_format)
        for tensor in draw()
    )
    try:
        least = floor(make_model(row, arguments), row.loss, batch, rate)
    except Exception as error:  # a row without its package
        least = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    torch._dynamo.reset()
    for column in arguments.columns:
        turns.add(column, lambda column=column: Column(row, column, arguments, batch))
        if column in turns.columns:  # a first figure, in case the run is stopped before the columns take turns
            each = turns.columns[column]
            each.time(arguments.steps)
            print(f"{name}: {column} is warm: {each.times.pop():.2f} ms, {each.mebibytes or 0} MiB", flush=True)
            del each
        else:
            print(f"{name}: {column} failed", flush=True)
    turns.finish()
    results = {column: turns.results[column] for column in arguments.columns}
    if turns.profiles:
        path = arguments.output.with_name(f"{arguments.output.stem}-{name}-profile.txt")
        path.write_text("\n\n".join(f"{column}\n{text}" for column, text in turns.profiles.items()) + "\n")
    show(results, least)
    return {"floor": least, **results}


def show(results: dict[str, Any], least: dict[str, Any]) -> None:
    """Print a row's results: milliseconds, and these by PyTorch's best column and by the floor."""
    torchs = [results[c].get("ms") for c in ("torch.amp", "compile", "reduce-overhead") if c in results]
    best = min((each for each in torchs if each), default=None)
    words = ", ".join(f"{key} {value}" for key, value in least.items())
    print(f"  floor            {words}")
    for column, result in results.items():
        if "error" in result:
            print(f"  {column:16} {result['error'].splitlines()[0][:100]}", flush=True)
            continue
        ratio = f"{result['ms'] / best:.2f}" if best else "-"
        distance = f"{result['ms'] / least['ms']:.2f}" if "ms" in least else "-"
        seconds = f"first step {result['first_step_s']} s, warm {result['first_s']} s"
        print(
            f"  {column:16} {result['ms']:9.2f} ms {ratio:>5} {distance:>5} of the floor {result['MiB'] or 0:7} MiB  "
            f"{seconds}, turn {result['turn']}"
        )
        if "report" in result:
            lines = [line for line in result["report"].splitlines() if line.startswith(("fuse", "compile", "chosen"))]
            print("\n".join(f"    {line[:400]}" for line in lines), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--steps", type=int, default=5, help="steps per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--alone", action="store_true", help="one column at a time in memory, as to fill caches")
    parser.add_argument("--profile", action="store_true", help="write each column's kernels beside the result file")
    parser.add_argument("--output", type=Path, help="the result file; by default one in benchmarks/results")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.output is None:
        arguments.output = RESULTS / f"{device_stem(device_name(device))}-plain-models.json"
    path, rate = arguments.output, rates(arguments.device)
    head: dict[str, Any] = describe(device)
    head["versions"] |= {"transformers": str(installed_version("transformers"))}
    run = {"date": head.pop("date"), "commit": commit(), "rates": rate}
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    for number, name in enumerate(arguments.rows):
        print(f"row {number + 1} of {len(arguments.rows)}", flush=True)
        rows[name] = {"run": run, **measure(name, arguments, rate)}
        gc.collect()
        path.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")  # after every row: a run may be stopped


def commit() -> str:
    """Return the commit of this checkout, or "unknown" outside of one."""
    run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return run.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
