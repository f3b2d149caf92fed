"""README, its picture and the table of whole steps say what the record says, of all of its rows."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLOT = runpy.run_path(str(ROOT / "benchmarks" / "plot_steps.py"))
ROWS = PLOT["rows"](json.loads((ROOT / "benchmarks" / "results" / "nvidia_h200-steps.json").read_text()))
RATIOS = {key: [ours[key] / theirs[key] for _, ours, theirs, _ in ROWS] for key in ("milliseconds", "mebibytes")}


def near(text: str, value: float) -> bool:
    """Return whether a figure with two places is the value, whichever way its last place was rounded."""
    return abs(float(text) - value) <= 0.006


def test_the_readme_has_the_whole_range() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    figures = r"(0\.\d\d|1\.\d\d) to (0\.\d\d|1\.\d\d) of "
    times = re.findall(figures + "the time of PyTorch's quickest", readme)
    memory = re.findall(r"nvidia_h200-steps\.json\)\), and " + figures + "its memory", readme)
    assert len(times) == 2
    assert len(memory) == 1
    for said, key in [*((pair, "milliseconds") for pair in times), (memory[0], "mebibytes")]:
        least, most = min(RATIOS[key]), max(RATIOS[key])
        assert near(said[0], least), (
            f"README says {said}, the record {least:.3f} to {most:.3f}: say the range of all rows"
        )
        assert near(said[1], most), (
            f"README says {said}, the record {least:.3f} to {most:.3f}: say the range of all rows"
        )


def test_the_picture_has_every_row() -> None:
    """Renew it by `python benchmarks/plot_steps.py`."""
    picture = (ROOT / "docs" / "steps.svg").read_text(encoding="utf-8")
    for name, ours, theirs, column in ROWS:
        expected = (name, f"{ours['milliseconds']:.1f} ms, apex", f"{theirs['milliseconds']:.1f} ms, {column}")
        assert all(f">{text}<" in picture for text in expected), expected


def test_the_table_has_every_row() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    table = page.partition("## Whole steps")[2].partition("\n\n|")[2].partition("\n\n")[0]
    said = re.findall(r"\| (\d\.\d\d) \((\d\.\d\d)\) \|$", table, re.MULTILINE)
    assert len(said) == len(ROWS)
    for figures, time, memory in zip(said, *RATIOS.values(), strict=True):
        assert near(figures[0], time)
        assert near(figures[1], memory)
