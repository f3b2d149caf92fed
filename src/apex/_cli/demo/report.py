"""The results of `apex demo`, as tables and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from ..console import make_console, make_table, print_json_document, print_table
from .training import Run

BASELINE = "O0"

# Short enough for a table in a terminal of 80 columns.
IN_WORDS = {
    "boost": "bf16",
    "O0": "fp32",
    "O1": "fp16 casts",
    "O2": "fp16 model",
    "O3": "pure fp16",
    "O4": "bf16 casts",
    "O5": "bf16 model",
}

# How far from float32 a final loss may be to count as equal, relative to it.
_CLOSE = 0.02


@dataclass(frozen=True)
class ModelFacts:
    """The description and the lowest possible loss of a model, which are the same in all of its runs."""

    describe: str
    lowest_loss: float | None


@dataclass
class Comparison:
    """Runs of the same models on the same data that differ only in the opt level."""

    device: str
    implementation: str
    steps: int
    scale_window: int
    memory_measured: str
    models: dict[str, ModelFacts]
    runs: list[Run] = field(default_factory=list)
    plot: str | None = None
    plot_problem: str | None = None

    def runs_of(self, model: str) -> list[Run]:
        """Return the runs of one model."""
        return [run for run in self.runs if run.model == model]

    def distance(self, run: Run) -> float | None:
        """Return the final loss minus the float32 run's, in nats; None without a float32 run."""
        baseline = self.baseline(run.model)
        return None if baseline is None else run.final_loss - baseline.final_loss

    def quickest(self, model: str) -> Run | None:
        """Return the quickest run whose final loss is as good as float32's; None without a float32 run."""
        baseline = self.baseline(model)
        if baseline is None:
            return None
        limit = baseline.final_loss + _CLOSE * abs(baseline.final_loss)
        good = [run for run in self.runs_of(model) if run.finite and run.final_loss <= limit]
        return min(good, key=lambda run: run.seconds_per_step, default=None)

    def baseline(self, model: str) -> Run | None:
        """Return the float32 run of a model, or None."""
        return next((run for run in self.runs_of(model) if run.level == BASELINE), None)

    @property
    def failed(self) -> list[Run]:
        """Runs with a loss that is not finite. O3 is left out, because it has no protection against overflow."""
        return [run for run in self.runs if not run.finite and run.level != "O3"]


def print_comparison(comparison: Comparison) -> None:
    """Print the common settings, a table with one row per run, conclusions, and the path of the plot."""
    console = make_console()
    summary = make_table(console, None, "what", "value")
    summary.show_header = False
    summary.add_row("device", f"{comparison.device}, one thread" if comparison.device == "cpu" else comparison.device)
    summary.add_row("kernels", comparison.implementation)
    for name, facts in comparison.models.items():
        summary.add_row(name, f"{comparison.runs_of(name)[0].parameters:,} parameters, {facts.describe}")
    summary.add_row(
        "steps", f"{comparison.steps:,}; a dynamic scale doubles after {comparison.scale_window} without overflow"
    )
    summary.add_row("memory", f"its peak: {comparison.memory_measured}")
    print_table(console, summary)
    table = make_table(console, None, "model", "level", *_COLUMNS, right=tuple(_COLUMNS))
    for run in comparison.runs:
        cells = [cell(comparison, run) for cell in _COLUMNS.values()]
        table.add_row(run.model, f"{run.level} {IN_WORDS[run.level]}", *cells)
    print_table(console, table)
    report = next((run for run in comparison.runs if run.report), None)
    if report is not None:
        console.print(f"apex.boost of {report.model} did this:")
        console.print(Text(report.report))
        console.print()
    for line in _conclusions(comparison):
        console.print(line)
    if comparison.plot is not None:
        console.print(f"plot: {comparison.plot}", soft_wrap=True)
    else:
        console.print(Text(f"no plot: {comparison.plot_problem}", style="yellow"))


def _signed(value: float | None) -> str:
    return "n/a" if value is None else f"{value:+.4f}"


# The numbers of a run in the table, by heading.
_COLUMNS: dict[str, Callable[[Comparison, Run], str]] = {
    "final loss": lambda comparison, run: f"{run.final_loss:.4f}",
    "vs fp32": lambda comparison, run: _signed(comparison.distance(run)),
    "time/step": lambda comparison, run: f"{run.seconds_per_step * 1e3:.2f} ms",
    "memory": lambda comparison, run: f"{run.peak_memory / 2**20:.2f} MiB",
    "skipped": lambda comparison, run: str(run.skipped),
}


def _conclusions(comparison: Comparison) -> list[Text]:
    """Return sentences about each model, and a warning for each run with a loss that is not finite."""
    lines = []
    for name, facts in comparison.models.items():
        best = comparison.quickest(name)
        if best is not None:
            lines.append(Text(f"{name}: {best.level} is the quickest here with a loss within {_CLOSE:.0%} of fp32's."))
        if facts.lowest_loss is not None:
            lines.append(Text(f"{name}: no model can get below {facts.lowest_loss:.4f} on this data."))
    lines += [
        Text(f"{run.model}: a loss of {run.level} is not finite: run `apex doctor`.", style="bold red")
        for run in comparison.failed
    ]
    return lines


def print_json(comparison: Comparison) -> None:
    """Print everything as one JSON document, with loss and scale of every step; a loss that is not finite is null."""
    models = {
        name: {"description": facts.describe, "lowest_loss": facts.lowest_loss}
        for name, facts in comparison.models.items()
    }
    runs = [_run_document(comparison, run) for run in comparison.runs]
    print_json_document({**vars(comparison), "models": models, "runs": runs})


def _run_document(comparison: Comparison, run: Run) -> dict[str, Any]:
    return {
        "model": run.model,
        "level": run.level,
        "parameters": run.parameters,
        "final_loss": _number(run.final_loss),
        "distance_to_fp32": _number(comparison.distance(run)),
        "seconds_per_step": run.seconds_per_step,
        "peak_memory_bytes": run.peak_memory,
        "skipped_steps": run.skipped,
        "losses": [_number(loss) for loss in run.losses],
        "loss_scales": run.scales,
        **({"report": run.report} if run.report else {}),
    }


def _number(value: float | None) -> float | None:
    """Return a number that JSON can hold: None instead of NaN and infinity."""
    return value if value is not None and math.isfinite(value) else None
