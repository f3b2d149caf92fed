"""The report of a Booster: the effect of each stage of `boost` and of a step, or why a stage did nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple


class StageRow(NamedTuple):
    """A stage, whether it was applied, and a text: its effect, or the reason why it was not applied."""

    stage: str
    done: bool
    text: str


class StageReport(list[StageRow]):
    """A list of stages, in the order of their application. Its text is a table."""

    def __str__(self) -> str:
        width = max((len(row.stage) for row in self), default=0)
        return "\n".join(f"{row.stage:{width}}  {'yes' if row.done else 'no ':3}  {row.text}" for row in self)


def fused_row(report: Any) -> StageRow:
    """Return the row of a report of `apex.fuse` on a model: fused modules by rule, and reasons for the others."""
    fused = Counter(row.rule for row in report if not row.reason)
    others = Counter(f"{row.kind}: {row.reason}" for row in report if row.reason)
    parts = [f"{count} x {rule}" for rule, count in fused.items()] or ["no module has a fused counterpart"]
    parts += [f"not {count} x {reason}" for reason, count in others.items()]
    return StageRow("fuse model", bool(fused), "; ".join(parts))
