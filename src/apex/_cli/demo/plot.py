"""The plot of `apex demo`: for every model the losses, their distances from float32, and the loss scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report import IN_WORDS, Comparison
from .training import LEVELS

_COLOURS = {
    "boost": "tab:green",
    "O0": "lightgrey",
    "O1": "tab:cyan",
    "O2": "tab:blue",
    "O3": "tab:red",
    "O4": "gold",
    "O5": "black",
}
_WIDTHS = (12, 9, 6.5, 4.5, 3, 2, 1)
_BFLOAT16 = ("boost", "O4", "O5")


def draw(comparison: Comparison, path: Path) -> str | None:
    """Write the plot to `path`; return None, or the reason if matplotlib does not import.

    Raises an OSError if the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "matplotlib"
        reason = "matplotlib is not installed" if missing else f"matplotlib does not import: {error}"
        return f"{reason}; get it with `pip install matplotlib`"
    columns = len(comparison.models)
    figure = Figure(figsize=(6.4 * columns, 9.6), layout="constrained")
    axes = figure.subplots(3, columns, squeeze=False, sharex="col", height_ratios=(2, 1, 1))
    for column, model in enumerate(comparison.models):
        for row, draw_panel in enumerate((_draw_losses, _draw_distances, _draw_scales)):
            panel: Any = axes[row, column]
            draw_panel(panel, comparison, model)
            panel.grid(alpha=0.3)
    figure.suptitle(f"The same models by apex.boost and at every opt level, on {comparison.device}")
    figure.savefig(path, dpi=130)
    return None


def _style(level: str, width: float = 1.0) -> dict[str, Any]:
    """Return the line style of a level. Each line is narrower than the lines below it, so that all stay visible."""
    index = LEVELS.index(level)
    style = "--" if level in _BFLOAT16 else "-"
    return {"color": _COLOURS[level], "linewidth": width * _WIDTHS[index], "linestyle": style, "zorder": 2 + index}


def _draw_losses(axes: Any, comparison: Comparison, model: str) -> None:
    for run in comparison.runs_of(model):
        steps = range(1, len(run.losses) + 1)
        label = f"{run.level} ({IN_WORDS[run.level]}), {run.final_loss:.4f}"
        axes.plot(steps, run.losses, label=label, **_style(run.level))
    lowest = comparison.models[model].lowest_loss
    if lowest is not None:
        axes.axhline(lowest, color="grey", linestyle=":", label=f"lowest possible, {lowest:.4f}")
    axes.set_title(model)
    axes.set_ylabel("loss, nats")
    axes.legend(title="level, final loss", fontsize="small")


def _draw_distances(axes: Any, comparison: Comparison, model: str) -> None:
    """Draw each step's loss minus the loss of the float32 run on the same batch."""
    axes.set_ylabel("loss minus float32")
    baseline = comparison.baseline(model)
    if baseline is None:
        axes.text(0.5, 0.5, "no run in float32 (O0)", ha="center", va="center", transform=axes.transAxes, color="grey")
        return
    axes.axhline(0, color="grey", linestyle=":")
    for run in comparison.runs_of(model):
        if run is not baseline:
            distances = [loss - exact for loss, exact in zip(run.losses, baseline.losses, strict=True)]
            axes.plot(range(1, len(distances) + 1), distances, **_style(run.level, 0.6))


def _draw_scales(axes: Any, comparison: Comparison, model: str) -> None:
    for run in comparison.runs_of(model):
        steps = range(1, len(run.scales) + 1)
        label = f"{run.level}, {run.skipped} skipped" if run.skipped else run.level
        axes.step(steps, run.scales, where="mid", label=label, **_style(run.level))
    axes.set_yscale("log", base=2)
    axes.set_xlabel("step")
    axes.set_ylabel("loss scale")
    axes.legend(fontsize="small", ncols=2)
