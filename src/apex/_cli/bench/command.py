"""`apex bench`: choose the cases, run them, write the file, print the table, draw the chart."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import torch
from rich.console import Console

from ..._bench import cores, timing
from ..._bench.environment import describe, device_stem
from ..._bench.recorded import recorded_measurements
from ..._bench.results import Report, write_json
from ..._bench.runner import run_case
from ..._bench.selection import known_families, select
from ..._bench.sweep import drawn_cases, run_sweep, sweep_families
from ..console import make_console, with_progress
from ..devices import pick_device
from ..errors import as_bad_parameter
from .chart import write_chart
from .table import print_report

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
    """Run the benchmark and return an exit status.

    An empty list of `families` means all. `output` is a JSON file, or a folder for it; the chart is written beside it.
    Without it results are only printed. `filter` keeps the cases whose name contains all of its words. `list_only`
    prints names and measures nothing. `all_cores` does not pin the process to one core while a GPU is timed. `sweep`
    names families, or "all", and measures `cases` random cases of each instead (see sweep.py).

    The status is 1 if a result of ours was wrong or failed, or a file could not be written. It is 130 if interrupted;
    the cases measured so far are then printed and written. A request that cannot be met is a `typer.BadParameter`.
    """
    console, messages = make_console(), make_console(stderr=True)
    with as_bad_parameter(ValueError, option="--device"):
        target = pick_device(device)
        if target.type not in ("cpu", "cuda"):
            raise ValueError(f"device {str(target)!r} cannot be measured; use cpu, cuda or cuda:<index>")
    if target.type == "cuda":
        torch.cuda.set_device(target)
    with as_bad_parameter(ValueError, OSError):
        if sweep is not None:
            if families:
                raise ValueError(f"{' '.join(families)}: families of a sweep are named with --sweep")
            drawn = list(drawn_cases(sweep_families(sweep), cases, seed, target, filter))
            names, again = [name for _, name, _ in drawn], f"--sweep {sweep} "
        else:
            selection = select(families, target, quick=quick, words=filter)
            names, again = [case.name for _, case in selection], ""
        if not names:
            raise ValueError(f"no case matches {filter!r}; `apex bench {again}--list` shows the names")
        if list_only:
            console.print("\n".join(names), soft_wrap=True)
            return SUCCESS
        path = _writable_path(output, target, families if sweep is None else ["sweep", *sweep.split(",")])
        if sweep is not None:
            about = {"sweep": sweep, "cases": cases, "seed": seed}
            return run_sweep(with_progress(drawn, "cases"), target, path, console, about, all_cores=all_cores)
    effort = replace(timing.QUICK if quick else timing.FULL, one_core=not all_cores)
    environment = describe(target)
    if target.type == "cuda":
        environment["device"]["cores"] = 1 if effort.one_core and cores.may_be_chosen() else os.cpu_count()
    report = Report(environment, timing.copy_bandwidth(target, effort), quick)
    device_name = environment["device"]["name"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    console.print(f"{device_name}: copy {report.copy_bandwidth:.0f} GB/s; {versions}", soft_wrap=True)
    recorded = recorded_measurements(device_stem(device_name))
    try:
        for family, case in with_progress(selection, "cases"):
            known = recorded.get(case.name)
            report.cases.append(run_case(case, family, target, effort, report.copy_bandwidth, known))
    except KeyboardInterrupt:
        report.interrupted = True
    return _publish(report, path, plot, console, messages)


def _writable_path(output: Path | None, device: torch.device, families: list[str]) -> Path | None:
    """Return the JSON file to write, or None without an `output`.

    The folder is created and checked first, because measuring takes minutes.
    """
    if output is None:
        return None
    name = describe(device)["device"]["name"]
    selection = "-".join(families) if families and len(families) < len(known_families()) else "all"
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    default_name = f"{device_stem(name)}-{selection}-{stamp}.json"
    if output.is_dir() or not output.suffix:
        path = output / default_name
    elif output.suffix == ".json":
        path = output
    else:
        raise ValueError(f"output {str(output)!r} must be a folder or a file that ends in .json")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"cannot write to {path.parent}")
    return path


def _publish(report: Report, path: Path | None, plot: bool, console: Console, messages: Console) -> int:
    """Write the JSON file, print the table and draw the chart; each is done even if another one fails."""
    status = SUCCESS if all(case.ours_is_sound for case in report.cases) else WRONG_RESULT
    try:
        if path is not None:
            write_json(report, path)
    except OSError as error:
        messages.print(f"apex bench: {path} was not written: {error}", style="red")
        status = WRONG_RESULT
    print_report(report, console)
    if path is not None and path.exists():
        console.print(f"results: {path}", soft_wrap=True)
    if plot and path is not None:
        chart = path.with_suffix(".png")
        try:
            write_chart(report, chart)
            console.print(f"chart: {chart}", soft_wrap=True)
        except (ImportError, OSError) as error:
            messages.print(f"no chart was drawn: {error}; `pip install matplotlib` provides what it needs", style="red")
    if report.interrupted:
        messages.print(f"interrupted: the cases measured so far were {'kept' if path else 'printed'}")
        return INTERRUPTED
    return status
