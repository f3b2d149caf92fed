"""The loss curves of `apex demo` as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report import Comparison

FORMATS = (".png", ".svg", ".pdf")

# The first curve is a broad light line, so that the second stays visible on top of it where the two are equal.
_STYLES: tuple[dict[str, Any], ...] = ({"linewidth": 5, "alpha": 0.4}, {"linewidth": 1.3})


def draw_losses(comparison: Comparison, path: Path) -> str | None:
    """Writes the picture to `path`, or returns why there is none. OSError when the file cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "matplotlib"
        reason = "matplotlib is not installed" if missing else f"matplotlib does not import: {error}"
        return f"{reason}; get it with `pip install matplotlib`"
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for index, (name, run) in enumerate(comparison.runs.items()):
        steps = range(1, len(run.losses) + 1)
        axes.plot(steps, run.losses, label=f"{name}, {run.final_loss:.4f}", **_STYLES[min(index, 1)])
    axes.axhline(
        comparison.lowest_loss, color="grey", linestyle="--", label=f"lowest possible, {comparison.lowest_loss:.4f}"
    )
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per character")
    axes.set_title(f"The same model with two layer norms, on {comparison.device}")
    axes.grid(alpha=0.3)
    axes.legend(title="norm, final loss")
    figure.savefig(path, dpi=150)
    return None
