"""The table of benchmark results, for a terminal or a pipe."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.measure import Measurement as Width
from rich.table import Table
from rich.text import Text

from ..._bench.registry import OURS
from ..._bench.results import CaseResult, Report
from ..console import make_table

WIDEST = 400  # characters: wider than any table
MISSING = "-"

Column = tuple[str, Callable[[CaseResult], Text]]  # a heading, and the cell of a case below it


def print_report(report: Report, console: Console) -> None:
    """Print a row per case, with fewer columns if the terminal is too narrow, and the failures after it."""
    if report.cases:
        table = _table(report, console, _full_columns(report.implementations()))
        if Width.get(console, console.options.update(max_width=WIDEST), table).maximum > console.width:
            table = _table(report, console, [_time(OURS), ("best peer us", _best_time), ("ours/best", _ratio)])
        console.print(table)
    for case in report.cases:
        for name, measurement in case.measurements.items():
            if measurement.status in ("wrong", "failed"):
                console.print(f"{case.name}: {name} {measurement.status}: {measurement.error}", markup=False)


def _table(report: Report, console: Console, columns: list[Column]) -> Table:
    headings = [heading for heading, _ in columns]
    table = make_table(console, None, "case", *headings, right=tuple(headings))
    for case in report.cases:
        table.add_row(case.name, *(cell(case) for _, cell in columns))
    return table


def _full_columns(implementations: list[str]) -> list[Column]:
    return [
        ("floor us", lambda case: _number(case.floor)),
        _time(OURS),
        ("GB/s", lambda case: _number(case.bandwidth(OURS), 0)),
        ("% of copy", lambda case: _number(case.percent_of_copy(OURS), 0)),
        ("host us", lambda case: _number(getattr(case.measurements.get(OURS), "host_microseconds", None))),
        ("gpu us", lambda case: _number(getattr(case.measurements.get(OURS), "gpu_microseconds", None))),
        *(_time(name) for name in implementations if name != OURS),
        ("best peer", lambda case: Text(case.best_peer or MISSING)),
        ("ours/best", _ratio),
    ]


def _time(implementation: str) -> Column:
    def cell(case: CaseResult) -> Text:
        measurement = case.measurements.get(implementation)
        if measurement is not None and measurement.microseconds is None:
            return Text(measurement.status, style="red")
        return _number(case.microseconds(implementation))

    return f"{implementation} us", cell


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
