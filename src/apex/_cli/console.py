"""Consoles and tables: styled in a terminal, plain and unabridged text without escape codes elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import _env

T = TypeVar("T")

_PIPE_WIDTH = 10_000  # so wide that no line is wrapped or cut; tables are as narrow as their content


def make_console(*, stderr: bool = False) -> Console:
    """Return a console that interprets no markup. It is wide in a pipe, and unstyled in a pipe or under NO_COLOR."""
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    styled = terminal and not _env.no_color()
    return Console(
        stderr=stderr,
        force_terminal=terminal,
        color_system="auto" if styled else None,
        width=None if terminal else _PIPE_WIDTH,
        markup=False,
        highlight=False,
        emoji=False,
    )


def make_table(console: Console, title: str | None, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return an empty table. Cells wrap and long words fold; columns named in `right` are aligned right."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold cyan",
        box=box.SIMPLE_HEAD if console.is_terminal else None,
        pad_edge=False,
    )
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in right else "left")
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table and an empty line. A table with a box already ends with one."""
    console.print(table)
    if table.box is None:
        console.print()


def with_progress(items: Iterable[T], what: str, total: int | None = None) -> Iterable[T]:
    """Yield the items; show a progress bar called `what` meanwhile if stderr is a terminal."""
    from rich.progress import track

    messages = make_console(stderr=True)
    return track(items, what, total, console=messages, disable=not messages.is_terminal, transient=True)


def severity_text(severity: str) -> Text:
    """Return a severity as a short coloured word."""
    styles = {"ok": "green", "warning": "yellow", "broken": "bold red"}
    return Text("BROKEN" if severity == "broken" else severity, style=styles[severity])


def print_json_document(document: Any) -> None:
    """Print one JSON document to stdout; raise a ValueError for NaN and infinity, which JSON does not have."""
    print(json.dumps(document, indent=2, allow_nan=False))
