"""Consoles and tables that are pleasant in a terminal and plain, whole and without escape codes elsewhere."""

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

# No line is wrapped or cut at this width; tables take only what they need of it.
_PIPE_WIDTH = 10_000


def make_console(*, stderr: bool = False) -> Console:
    """A console that takes text literally; wide in a pipe, without styles in a pipe or under NO_COLOR."""
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
    """An empty table. Cells wrap and long words fold, so that nothing is lost; columns named in `right` align right."""
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
    """Prints a table with an empty line after it, which a table with lines has already."""
    console.print(table)
    if table.box is None:
        console.print()


def with_progress(items: Iterable[T], what: str, total: int | None = None) -> Iterable[T]:
    """The items, with a progress bar on stderr while they are taken if that is a terminal."""
    from rich.progress import track

    messages = make_console(stderr=True)
    return track(items, what, total, console=messages, disable=not messages.is_terminal, transient=True)


def severity_text(severity: str) -> Text:
    """A severity as a short coloured word."""
    styles = {"ok": "green", "warning": "yellow", "broken": "bold red"}
    return Text("BROKEN" if severity == "broken" else severity, style=styles[severity])


def print_json_document(document: Any) -> None:
    """One JSON document on stdout, strictly JSON: no NaN, no infinity."""
    print(json.dumps(document, indent=2, allow_nan=False))
