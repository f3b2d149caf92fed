"""`apex demo` from options to exit status."""

from __future__ import annotations

import warnings

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..console import make_console
from ..devices import pick_device
from .report import Comparison, ModelFacts, print_comparison, print_json
from .tasks import MODELS, Task, make_task
from .training import LEVELS, Run, memory_in_words, scale_window, train

_STEPS_ON_CPU = 40
_STEPS_ON_GPU = 200


def run_demo(*, model: str, levels: str, steps: int | None, device: str | None, as_json: bool) -> int:
    """Trains and prints; the exit status is 1 when a loss is not finite at a level that guards against it."""
    chosen_levels = _parse_levels(levels)
    try:
        chosen = pick_device(device)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from None
    implementation = _implementation(chosen)
    if steps is None:
        steps = _STEPS_ON_CPU if chosen.type == "cpu" else _STEPS_ON_GPU
    tasks = [make_task(name, steps, chosen) for name in (MODELS if model == "all" else (model,))]
    comparison = Comparison(
        device=str(chosen),
        implementation=implementation,
        steps=steps,
        scale_window=scale_window(steps),
        memory_measured=memory_in_words(chosen),
        models={task.name: ModelFacts(task.describe, task.lowest_loss) for task in tasks},
    )
    comparison.runs = _train_all(tasks, chosen_levels)
    (print_json if as_json else print_comparison)(comparison)
    return int(bool(comparison.failed))


def _parse_levels(text: str) -> list[str]:
    """Opt levels from a list with commas, in the order and number given but each once."""
    levels = [level.strip().upper() for level in text.split(",") if level.strip()]
    unknown = [level for level in levels if level not in LEVELS]
    if unknown or not levels:
        what = f"unknown: {', '.join(unknown)}" if unknown else "no opt level given"
        raise typer.BadParameter(f"{what}; choose from {','.join(LEVELS)}", param_hint="--levels")
    return list(dict.fromkeys(levels))


def _implementation(device: torch.device) -> str:
    """Which implementation apex's ops take on `device`, and why."""
    from ...ops import explain, norm

    try:
        choice = explain(norm.FAMILY, device, torch.float32)
    except (RuntimeError, ValueError) as error:  # a request of APEX_IMPL that is unknown or cannot be met
        raise typer.BadParameter(str(error), param_hint="APEX_IMPL") from None
    return f"{choice.implementation} ({choice.reason})"


def _train_all(tasks: list[Task], levels: list[str]) -> list[Run]:
    """One run per model and level, with a progress bar each on stderr if that is a terminal."""
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
        # PyTorch's way of saying, with a stack trace, that this CPU has no half-precision arithmetic.
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        for task in tasks:
            for level in levels:
                bar = progress.add_task(f"{task.name} {level}", total=len(task.batches), loss="")

                def advance(loss: float, bar=bar) -> None:  # type: ignore[no-untyped-def]
                    progress.update(bar, advance=1, loss=f"{loss:.3f}")

                runs.append(train(task, level, advance))
    return runs
