"""`apex bench`: choose the cases, run them, write the files, print the tables."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, track

from . import cores, timing
from .chart import ChartUnavailableError, write_chart
from .environment import choose_device, describe, device_stem
from .recorded import recorded_measurements
from .registry import Selection, known_families, select
from .results import Report, write_json
from .runner import run_case, run_memory_case
from .sweep import drawn_cases, run_sweep, sweep_families
from .table import output_console, print_report

RESULTS_DIRECTORY = Path("benchmarks") / "results"
SUCCESS, WRONG_RESULT, INTERRUPTED = 0, 1, 130


def run_bench(
    families: list[str],
    *,
    output: Path | None = None,
    plot: bool = True,
    quick: bool = False,
    device: str | None = None,
    filter: str | None = None,
    list_only: bool = False,
    all_cores: bool = False,
    sweep: str | None = None,
    cases: int = 200,
    seed: int = 0,
) -> int:
    """Runs the benchmark and returns an exit status.

    `families` empty means all. `output` is the JSON file, or a folder for it (default: `benchmarks/results`); the chart
    goes beside it. `filter` keeps the cases whose name contains all of its words. `list_only` prints names and measures
    nothing. With `all_cores` the process is not kept on one core while a GPU is timed. `sweep` names families, or all
    of them, of which `cases` random cases are measured instead (see sweep.py). The status is 0, 1 where a result of
    ours was wrong or failed or a file could not be written, 130 when interrupted (what was measured is kept). A request
    that cannot be met is a `typer.BadParameter`.
    """
    console, messages = output_console(), output_console(stderr=True)
    try:
        target = choose_device(device)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error
    try:
        if sweep is not None:
            if families:
                raise ValueError(f"{' '.join(families)}: families of a sweep are named with --sweep")
            drawn = list(drawn_cases(sweep_families(sweep), cases, seed, target, filter))
            if not drawn:
                raise ValueError(f"no case matches {filter!r}; `apex bench --sweep {sweep} --list` shows the names")
            if list_only:
                for _, name, _ in drawn:
                    console.print(name, markup=False)
                return SUCCESS
            path = _writable_path(output, target, ["sweep", *sweep.split(",")])
            about = {"sweep": sweep, "cases": cases, "seed": seed}
            shown = track(drawn, "cases", console=messages, disable=not messages.is_terminal, transient=True)
            return run_sweep(shown, target, path, console, about, all_cores=all_cores)
        selection = select(families, target, quick=quick, words=filter)
        if not selection:
            raise ValueError(f"no case matches {filter!r}; `apex bench --list` shows the names")
        if list_only:
            _list(selection, console)
            return SUCCESS
        path = _writable_path(output, target, families)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    effort = replace(timing.QUICK if quick else timing.FULL, one_core=not all_cores)
    report = _run(selection, target, effort, quick, console, messages)
    return _publish(report, path, plot, console, messages)


def _list(selection: Selection, console: Console) -> None:
    for _, case in selection.timed:
        console.print(case.name, markup=False)
    for _, memory_case in selection.memory:
        console.print(memory_case.name, markup=False)


def _writable_path(output: Path | None, device: torch.device, families: list[str]) -> Path:
    """The JSON file to write, its folder made and found writable before minutes are spent on measuring."""
    name = describe(device)["device"]["name"]
    what = "-".join(families) if families and len(families) < len(known_families()) else "all"
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    default_name = f"{device_stem(name)}-{what}-{stamp}.json"
    if output is None:
        path = RESULTS_DIRECTORY / default_name
    elif output.is_dir() or not output.suffix:
        path = output / default_name
    elif output.suffix == ".json":
        path = output
    else:
        raise ValueError(
            f"output {str(output)!r} must be a folder or a file that ends in .json; the chart goes beside it"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"cannot write to {path.parent}")
    return path


def _run(
    selection: Selection, device: torch.device, effort: timing.Effort, quick: bool, console: Console, messages: Console
) -> Report:
    environment = describe(device)
    if device.type == "cuda":
        environment["device"]["cores"] = 1 if effort.one_core and cores.may_be_chosen() else os.cpu_count()
    recorded = recorded_measurements(device_stem(environment["device"]["name"]))
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=messages,
        disable=not messages.is_terminal,
        transient=True,
    )
    with on_device, progress:
        task = progress.add_task("copy bandwidth", total=len(selection))
        report = Report(environment, timing.copy_bandwidth(device, effort), quick)
        console.print(_headline(report), markup=False)
        try:
            for family, case in selection.timed:
                progress.update(task, description=case.name)
                known = recorded.get(case.recorded_as or case.name)
                report.cases.append(run_case(case, family, device, effort, report.copy_bandwidth, known))
                progress.advance(task)
            for family, memory_case in selection.memory:
                progress.update(task, description=memory_case.name)
                report.memory.append(run_memory_case(memory_case, family, device))
                progress.advance(task)
        except KeyboardInterrupt:
            report.interrupted = True
    return report


def _headline(report: Report) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.environment["versions"].items())
    return f"{report.environment['device']['name']}: copy {report.copy_bandwidth:.0f} GB/s; {versions}"


def _publish(report: Report, path: Path, plot: bool, console: Console, messages: Console) -> int:
    """The JSON first, then the tables, then the chart, so that a failure loses nothing before it."""
    sound = all(c.ours_is_sound for c in report.cases) and all(c.ours_is_sound for c in report.memory)
    status = SUCCESS if sound else WRONG_RESULT
    try:
        write_json(report, path)
    except OSError as error:
        messages.print(f"apex bench: {path} was not written: {error}", style="red", markup=False)
        status = WRONG_RESULT
    print_report(report, console)
    if path.exists():
        console.print(f"results: {path}", markup=False)
    if plot and report.cases:
        try:
            write_chart(report, path.with_suffix(".png"))
            console.print(f"chart: {path.with_suffix('.png')}", markup=False)
        except ChartUnavailableError as error:
            messages.print(f"{error}; `pip install matplotlib` provides it", markup=False)
        except OSError as error:
            messages.print(f"apex bench: no chart was written: {error}", style="red", markup=False)
    if report.interrupted:
        messages.print("interrupted: the cases measured so far were kept", markup=False)
        return INTERRUPTED
    return status
