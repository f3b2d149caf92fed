"""`apex demo` from options to exit status."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..console import make_console
from ..devices import pick_device
from .plot import FORMATS, draw_losses
from .report import Comparison, print_comparison, print_json
from .training import Language, NormFactory, Run, Settings, train_side_by_side


def run_demo(*, steps: int, device: str | None, as_json: bool, plot: Path) -> int:
    """Trains twice, draws and prints. The exit status is 1 when a loss is not finite or the plot cannot be written."""
    _check_plot_path(plot)
    try:
        chosen = pick_device(device)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from None
    norm, implementation = _fused_norm(chosen)
    settings = Settings(steps=steps)
    norms: dict[str, NormFactory] = {"apex FusedLayerNorm": norm, "torch LayerNorm": torch.nn.LayerNorm}
    comparison = Comparison(
        device=str(chosen),
        implementation=implementation,
        settings=settings,
        lowest_loss=Language(settings).lowest_loss(),
        runs=_train_all(settings, norms, chosen),
    )
    status = 0 if comparison.finite else 1
    try:
        comparison.plot_problem = draw_losses(comparison, plot)
    except OSError as error:
        comparison.plot_problem = f"the plot could not be written: {error}"
        status = 1
    comparison.plot = None if comparison.plot_problem else str(plot.resolve())
    (print_json if as_json else print_comparison)(comparison)
    return status


def _check_plot_path(path: Path) -> None:
    """Refuses a path that cannot work before the training rather than after it."""
    problem = None
    if path.suffix.lower() not in FORMATS:
        problem = f"{str(path)!r} does not end in one of {', '.join(FORMATS)}"
    elif path.is_dir():
        problem = f"{str(path)!r} is a folder"
    elif not path.resolve().parent.is_dir():
        problem = f"the folder {str(path.resolve().parent)!r} does not exist"
    elif not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
        problem = f"{str(path)!r} cannot be written"
    if problem is not None:
        raise typer.BadParameter(problem, param_hint="--plot")


def _fused_norm(device: torch.device) -> tuple[NormFactory, str]:
    """The fused norm, and which implementation it takes on `device` and why."""
    try:
        from ...normalization import FusedLayerNorm
        from ...ops import explain, norm

        choice = explain(norm.FAMILY, device, torch.float32)
    except (RuntimeError, ValueError) as error:  # a request of APEX_IMPL that is unknown or cannot be met
        raise typer.BadParameter(str(error), param_hint="APEX_IMPL") from None
    return FusedLayerNorm, f"{choice.implementation} ({choice.reason})"


def _train_all(settings: Settings, norms: dict[str, NormFactory], device: torch.device) -> dict[str, Run]:
    """One run per norm, with a progress bar each on stderr if that is a terminal."""
    console = make_console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("loss {task.fields[loss]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks = {name: progress.add_task(name, total=settings.steps, loss="") for name in norms}

        def advance(name: str, loss: float) -> None:
            progress.update(tasks[name], advance=1, loss=f"{loss:.3f}")

        return train_side_by_side(settings, norms, device, advance)
