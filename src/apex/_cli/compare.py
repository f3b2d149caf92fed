"""`apex compare`: find the first module where two dumps differ, print the rows around it and plot all errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.text import Text

from ..dump import Comparison, compare
from .console import make_console, make_table, print_json_document, print_table
from .errors import as_bad_parameter, check_picture

_AROUND = 5  # rows printed before and after the first difference


def run_compare(
    first: Path,
    second: list[str],
    *,
    tolerance: float | None = None,
    show_all: bool = False,
    as_json: bool = False,
    plot: Path = Path("apex-compare.png"),
) -> int:
    """Compare two dumps and print the first difference; return the exit status, 1 if they differ."""
    console, messages = make_console(), make_console(stderr=True)
    if not as_json:
        check_picture(plot)
    with as_bad_parameter(ValueError, OSError, ModuleNotFoundError):
        comparison = compare(first, second if len(second) > 1 else second[0], tolerance=tolerance)
        unplotted = None if as_json else draw(comparison, plot)
    difference, tensors = comparison.first, comparison.rows
    if as_json:  # JSON has no infinity
        rows = [{name: None if value == math.inf else value for name, value in vars(row).items()} for row in tensors]
        first_row = None if difference is None else rows[tensors.index(difference)]
        print_json_document({"first": first_row, **vars(comparison), "rows": rows})
        return int(difference is not None)
    _print_table(console, comparison, show_all)
    for which, keys in (("first", comparison.only_in_first), ("second", comparison.only_in_second)):
        if keys:
            console.print(f"only in the {which} dump: {len(keys)} tensors, such as {' '.join(map(str, keys[0]))}")
    if difference is None:
        console.print(f"the dumps agree: {len(tensors)} tensors are within their tolerances")
    else:
        errors = f"relative error {difference.error:.3g}, allowed {difference.tolerance:.3g}"
        console.print(f"first difference: {_describe(difference)}: {errors}")
    (messages if unplotted else console).print(unplotted or f"picture: {plot}")
    return int(difference is not None)


def _describe(row: Any) -> str:
    """Return the module, its class and the kind of tensor of a row."""
    return f"{row.module or '(model)'} ({row.layer}), {row.kind}"


def _print_table(console: Any, comparison: Comparison, show_all: bool) -> None:
    """Print all rows, the rows around the first difference, or the ones with the largest errors if there is none."""
    rows, first = comparison.rows, comparison.first
    if first is not None and not show_all:
        index = rows.index(first)
        rows = rows[max(0, index - _AROUND) : index + _AROUND + 1]
    elif not show_all:
        rows = sorted(sorted(rows, key=lambda row: -row.error)[: 2 * _AROUND], key=lambda row: row.order)
    numbers = ("order", "relative error", "allowed", "largest error")
    table = make_table(console, None, "order", "module", "class", "pass", "dtypes", *numbers[1:], "", right=numbers)
    for row in rows:
        style = "bold red" if row is first else "red" if row.exceeds else ""
        dtypes = " ".join(dict.fromkeys(row.dtypes))
        measured = (f"{row.error:.2e}", f"{row.tolerance:.0e}", f"{row.largest:.2e}")
        mark = "first difference" if row is first else row.note
        cells = (str(row.order), row.module or "(model)", row.layer, row.kind, dtypes, *measured, mark)
        table.add_row(*(Text(cell, style=style) for cell in cells))
    print_table(console, table)


def draw(comparison: Comparison, path: Path) -> str | None:
    """Plot the errors by execution order to `path`; return None, or the reason if matplotlib does not import."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no picture: matplotlib cannot be imported ({error}); get it with `pip install matplotlib`"
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    floor = 1e-12
    for kind, marker in (("forward", "o"), ("backward", "v"), ("parameter", "x")):
        points = [(row.order, min(max(row.error, floor), 1e4)) for row in comparison.rows if row.kind == kind]
        if points:
            axes.semilogy(*zip(*points, strict=True), marker, markersize=4, label=kind)
    allowed = [(row.order, max(row.tolerance, floor)) for row in comparison.rows]
    axes.semilogy(*zip(*allowed, strict=True), "--", color="grey", label="allowed")
    first = comparison.first
    if first is not None:
        axes.axvline(first.order, color="red", linewidth=1)
        axes.set_title(f"first difference: {_describe(first)}")
    axes.set(xlabel="order of execution", ylabel="relative error")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    return None
