"""`apex demo`: check the options, train, draw and print."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..console import make_console
from ..devices import pick_device
from ..errors import as_bad_parameter, check_picture
from .plot import draw
from .report import Comparison, ModelFacts, print_comparison, print_json
from .tasks import RECIPES, Task, make_task
from .training import LEVELS, Run, memory_in_words, scale_window, train

_STEPS_ON_CPU = 40
_STEPS_ON_GPU = 200


def run_demo(*, model: str, levels: str, steps: int | None, device: str | None, as_json: bool, plot: Path) -> int:
    """Train, draw and print; return the exit status.

    The status is 1 if the plot cannot be written, or if a loss is not finite at a level other than O3.
    """
    chosen_levels = _parse_levels(levels)
    check_picture(plot)
    with as_bad_parameter(ValueError, option="--device"):
        target = pick_device(device)
    implementation = _implementation(target)
    if steps is None:
        steps = _STEPS_ON_CPU if target.type == "cpu" else _STEPS_ON_GPU
    tasks = [make_task(name, steps, target) for name in (RECIPES if model == "all" else (model,))]
    comparison = Comparison(
        device=str(target),
        implementation=implementation,
        steps=steps,
        scale_window=scale_window(steps),
        memory_measured=memory_in_words(target),
        models={task.name: ModelFacts(task.describe, task.lowest_loss) for task in tasks},
    )
    comparison.runs = _train_all(tasks, chosen_levels)
    status = 1 if comparison.failed else 0
    try:
        comparison.plot_problem = draw(comparison, plot)
    except OSError as error:
        comparison.plot_problem = f"the plot could not be written: {error}"
        status = 1
    comparison.plot = None if comparison.plot_problem else str(plot.resolve())
    (print_json if as_json else print_comparison)(comparison)
    return status


def _parse_levels(text: str) -> list[str]:
    """Return the opt levels of a comma-separated list, in its order and without repetitions."""
    known = {level.lower(): level for level in LEVELS}
    levels = [known.get(level.lower(), level) for level in map(str.strip, text.split(",")) if level]
    unknown = [level for level in levels if level not in LEVELS]
    if unknown or not levels:
        problem = f"unknown: {', '.join(unknown)}" if unknown else "no opt level given"
        raise typer.BadParameter(f"{problem}; choose from {','.join(LEVELS)}", param_hint="--levels")
    return list(dict.fromkeys(levels))


def _implementation(device: torch.device) -> str:
    """Return the implementation that apex's ops choose on `device`, with the reason."""
    from ...ops import explain, norm

    with as_bad_parameter(RuntimeError, ValueError, option="APEX_IMPL"):  # which may be unknown or impossible here
        choice = explain(norm.FAMILY, device, torch.float32)
    return f"{choice.implementation} ({choice.reason})"


def _train_all(tasks: list[Task], levels: list[str]) -> list[Run]:
    """Train every model at every level. Show progress bars if stderr is a terminal."""
    console = make_console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("loss {task.fields[loss]}"),
    )
    runs = []
    with warnings.catch_warnings(), Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        # PyTorch warns so, with a stack trace, on a CPU without half-precision arithmetic.
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        for task in tasks:
            for level in levels:
                bar = progress.add_task(f"{task.name} {level}", total=len(task.batches), loss="")

                def advance(loss: float, bar=bar) -> None:  # type: ignore[no-untyped-def]
                    progress.update(bar, advance=1, loss=f"{loss:.3f}")

                runs.append(train(task, level, advance))
    return runs
