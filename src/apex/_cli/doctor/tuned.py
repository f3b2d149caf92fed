"""Tables of tuned launches, and how many of their entries are in use on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from ...ops import _tuned
from .findings import Finding


@dataclass(frozen=True)
class TunedTable:
    """A table of tuned launches, with the number of its entries, of those in use here, and the reason for the rest."""

    path: str
    gpu: str
    driver: int
    triton: str
    entries: int
    in_use: int
    problem: str | None


def examine_tables(gpus: list[str]) -> tuple[list[TunedTable], list[Finding]]:
    """Return the tables of the file that APEX_TUNED names, and findings about tables that no GPU here uses."""
    tables: list[TunedTable] = []
    findings: list[Finding] = []
    for table in _tuned.tables():
        usable = sum(_tuned.fits(entry) and entry["op"] in _tuned.TUNABLE for entry in table.entries)
        problem, stale = table.problem, table.problem is not None
        if table.gpu not in ("", *gpus):
            problem, stale = "for another GPU", False
        elif problem is None and usable < len(table.entries):
            problem, stale = f"{len(table.entries) - usable} entries are for rules that are no longer there", True
        in_use = usable if table.problem is None and table.gpu in gpus else 0
        row = (str(table.path), table.gpu, table.driver, table.triton, len(table.entries), in_use, problem)
        tables.append(TunedTable(*row))
        if stale:
            findings.append(Finding("warning", "tuned launches", f"{table.path}: {problem}"))
    return tables, findings
