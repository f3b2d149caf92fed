"""The tables of a run, for a terminal or a pipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.measure import Measurement as Width
from rich.table import Table
from rich.text import Text

from .registry import OURS
from .results import CaseResult, MemoryResult, Report

PIPED_WIDTH = 400  # wider than any table: nothing is cut where nobody can widen the window
MISSING = "-"


@dataclass(frozen=True)
class Column:
    """A heading and the cell of a case below it."""

    heading: str
    cell: Callable[[CaseResult], Text]


def output_console(*, stderr: bool = False) -> Console:
    """A console that uses the terminal's width, or a very wide line where the output is not a terminal."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=stderr, highlight=False, width=PIPED_WIDTH, soft_wrap=True)
    return console


def print_report(report: Report, console: Console) -> None:
    """The timing table, the memory table where there is one, and what went wrong."""
    if report.cases:
        table = timing_table(report.cases, _full_columns(report.implementations()))
        if Width.get(console, console.options.update(max_width=PIPED_WIDTH), table).maximum > console.width:
            table = timing_table(report.cases, _narrow_columns(), narrow=True)
        console.print(table)
    if report.memory:
        console.print(memory_table(report))
    for line in _problems(report):
        console.print(line, markup=False)


def timing_table(cases: list[CaseResult], columns: list[Column], *, narrow: bool = False) -> Table:
    """One row per case, with these columns; `narrow` saves space and folds a case's name rather than cut it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1) if narrow else (0, 1))
    table.add_column("case", no_wrap=not narrow, overflow="fold")
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for case in cases:
        table.add_row(case.name, *(column.cell(case) for column in columns))
    return table


def memory_table(report: Report) -> Table:
    """Peak MiB per step and implementation."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("peak memory of a step, MiB", no_wrap=True)
    names = report.memory_implementations()
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for case in report.memory:
        table.add_row(case.name, *(_memory_cell(case, name) for name in names))
    return table


def _memory_cell(case: MemoryResult, name: str) -> str:
    if name in case.peak_bytes:
        return f"{case.peak_bytes[name] / 2**20:.1f}"
    return "failed" if name in case.errors else MISSING


def _full_columns(implementations: list[str]) -> list[Column]:
    peers = [name for name in implementations if name != OURS]
    return [
        Column("floor us", lambda case: _number(case.floor)),
        _time_column(OURS),
        Column("GB/s", lambda case: _number(case.bandwidth(OURS), 0)),
        Column("% of copy", lambda case: _number(case.percent_of_copy(OURS), 0)),
        Column("host us", _of_ours("host_microseconds")),
        Column("gpu us", _of_ours("gpu_microseconds")),
        *(_time_column(name) for name in peers),
        Column("best peer", lambda case: Text(case.best_peer or MISSING)),
        Column("ours/best", _ratio),
    ]


def _narrow_columns() -> list[Column]:
    return [_time_column(OURS), Column("best peer us", _best_time), Column("ours/best", _ratio)]


def _time_column(implementation: str) -> Column:
    def cell(case: CaseResult) -> Text:
        measurement = case.measurements.get(implementation)
        if measurement is None:
            return Text(MISSING)
        if measurement.microseconds is None:
            return Text(measurement.status, style="red")
        return _number(measurement.microseconds)

    return Column(f"{implementation} us", cell)


def _of_ours(field: str) -> Callable[[CaseResult], Text]:
    def cell(case: CaseResult) -> Text:
        return _number(getattr(case.measurements.get(OURS), field, None))

    return cell


def _best_time(case: CaseResult) -> Text:
    peer = case.best_peer
    return Text(MISSING) if peer is None else Text(f"{peer} ").append_text(_number(case.microseconds(peer)))


def _ratio(case: CaseResult) -> Text:
    text = _number(case.ratio, 2)
    if case.ratio is not None:
        text.stylize("green" if case.ratio <= 1 else "yellow")
    return text


def _number(value: float | None, digits: int = 1) -> Text:
    return Text(MISSING if value is None else f"{value:.{digits}f}")


def _problems(report: Report) -> list[str]:
    """A line for every result that has no figure because it was wrong or failed."""
    lines = [
        f"{case.name}: {name} {measurement.status}: {measurement.error}"
        for case in report.cases
        for name, measurement in case.measurements.items()
        if measurement.status in ("wrong", "failed")
    ]
    lines += [f"{case.name}: {name} failed: {error}" for case in report.memory for name, error in case.errors.items()]
    return lines
