"""A bar chart of benchmark results: the share of the copy bandwidth that each implementation reaches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..._bench.registry import OURS
from ..._bench.results import CaseResult, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OUR_COLOUR = "#0b6e4f"
PEER_COLOURS = ("#9aa5b1", "#e0a458", "#7fb3d5", "#b28bbd", "#d98880", "#c5c99a")
BAR_INCHES = 0.11
PANEL_ORDER = ("fwd", "bwd", "step", "gpt1.3b", "resnet50", "1000_small")


def write_chart(report: Report, path: Path) -> None:
    """Write a PNG with one panel per kind of case (the last word of its name) and one group of bars per case.

    Raises an ImportError without matplotlib.
    """
    from matplotlib.figure import Figure

    panels = _panels(report.cases)
    if not panels:
        return
    names = report.implementations()
    colours = _colours(names)
    tallest = max(len(cases) for cases in panels.values())
    figure = Figure(figsize=(5.2 * len(panels), 1.4 + tallest * (len(names) + 1.5) * BAR_INCHES), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (kind, cases) in zip(axes, panels.items(), strict=True):
        shown = [name for name in names if any(name in case.measurements for case in cases)]
        _draw(axis, cases, shown, colours)
        axis.set_title(kind)
    handles = {h.get_label(): h for axis in axes for h in axis.containers}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    device, versions = report.environment["device"]["name"], report.environment["versions"]
    figure.suptitle(f"{device}, torch {versions['torch']}, copy {report.copy_bandwidth:.0f} GB/s")
    figure.savefig(path, dpi=130)


def _panels(cases: list[CaseResult]) -> dict[str, list[CaseResult]]:
    """Group cases by the last word of their names, in the order of PANEL_ORDER, then all others together."""
    groups: dict[str, list[CaseResult]] = {}
    for case in cases:
        if any(m.microseconds is not None for m in case.measurements.values()):
            groups.setdefault(case.name.rsplit(" ", 1)[-1], []).append(case)
    usual = {kind: groups.pop(kind) for kind in PANEL_ORDER if kind in groups}
    others = [case for group in groups.values() for case in group]
    return usual | ({"other": others} if others else {})


def _colours(names: list[str]) -> dict[str, str]:
    peers = [name for name in names if name != OURS]
    return {OURS: OUR_COLOUR} | {name: PEER_COLOURS[i % len(PEER_COLOURS)] for i, name in enumerate(peers)}


def _draw(axis: Axes, cases: list[CaseResult], names: list[str], colours: dict[str, str]) -> None:
    """Draw horizontal bars, longer is quicker, and a dashed line at the bandwidth of a plain copy."""
    height = 0.85 / len(names)
    for index, name in enumerate(names):
        bars = [(row, share) for row, case in enumerate(cases) if (share := case.percent_of_copy(name)) is not None]
        if bars:
            axis.barh(
                [row + (index - (len(names) - 1) / 2) * height for row, _ in bars],
                [share for _, share in bars],
                height=height,
                color=colours[name],
                hatch="///" if name.startswith("nvidia") else None,
                edgecolor="white",
                linewidth=0.3,
                label=f"{name} (recorded)" if name.startswith("nvidia") else name,
            )
    axis.set_yticks(range(len(cases)), [case.name.rsplit(" ", 1)[0] for case in cases], fontsize=7)
    axis.set_ylim(len(cases) - 0.4, -0.6)
    axis.axvline(100, color="black", linewidth=0.8, linestyle="--")
    axis.set_xlabel("% of copy bandwidth")
    axis.spines[["top", "right"]].set_visible(False)
