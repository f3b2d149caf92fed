"""The outcome of `apex demo`, for people and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from rich.text import Text

from ..console import make_console, make_table, print_json_document, print_table
from .training import Run, Settings


@dataclass
class Comparison:
    """Runs of the same model on the same data, by name; they differ in the norm alone."""

    device: str
    implementation: str
    settings: Settings
    lowest_loss: float
    runs: dict[str, Run]
    plot: str | None = None
    plot_problem: str | None = None

    @property
    def finite(self) -> bool:
        return all(math.isfinite(loss) for run in self.runs.values() for loss in run.losses)

    @property
    def largest_difference(self) -> float:
        """The largest distance between the loss curves, in nats."""
        curves = zip(*(run.losses for run in self.runs.values()), strict=True)
        return max(max(losses) - min(losses) for losses in curves)


def print_comparison(comparison: Comparison) -> None:
    """What the runs have in common, a table with one row per run, what it means, and where the plot is."""
    console = make_console()
    summary = make_table(console, None, "what", "value")
    summary.show_header = False
    run = next(iter(comparison.runs.values()))
    summary.add_row("device", comparison.device)
    summary.add_row("FusedLayerNorm", comparison.implementation)
    summary.add_row("parameters", f"{run.parameters:,}")
    summary.add_row("steps", f"{len(run.losses):,} of {run.tokens_per_step:,} tokens")
    print_table(console, summary)
    numbers = ("first loss", "final loss", "time per step", "tokens/s")
    table = make_table(console, None, "norm", *numbers, right=numbers)
    for name, run in comparison.runs.items():
        table.add_row(
            name,
            f"{run.first_loss:.4f}",
            f"{run.final_loss:.4f}",
            f"{run.seconds_per_step * 1e3:.2f} ms",
            f"{run.tokens_per_second:,.0f}",
        )
    print_table(console, table)
    console.print(
        f"The curves are at most {comparison.largest_difference:.2g} apart; "
        f"no model can get below {comparison.lowest_loss:.4f} on this data."
    )
    if not comparison.finite:
        console.print(Text("A loss is not finite: run `apex doctor`.", style="bold red"))
    if comparison.plot is not None:
        console.print(f"plot: {comparison.plot}", soft_wrap=True)
    else:
        console.print(Text(f"no plot: {comparison.plot_problem}", style="yellow"))


def print_json(comparison: Comparison) -> None:
    """Everything as one JSON document, with the loss of every step; a loss that is not finite is null."""
    runs = [
        {
            "norm": name,
            "parameters": run.parameters,
            "steps": len(run.losses),
            "first_loss": _number(run.first_loss),
            "final_loss": _number(run.final_loss),
            "seconds_per_step": run.seconds_per_step,
            "tokens_per_second": run.tokens_per_second,
            "losses": [_number(loss) for loss in run.losses],
        }
        for name, run in comparison.runs.items()
    ]
    print_json_document(
        {
            "device": comparison.device,
            "implementation": comparison.implementation,
            "settings": asdict(comparison.settings),
            "lowest_loss": comparison.lowest_loss,
            "largest_difference": _number(comparison.largest_difference),
            "runs": runs,
            "plot": comparison.plot,
            "plot_problem": comparison.plot_problem,
        }
    )


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
