"""`benchmarks/bottleneck.py` on tiny blocks."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bottleneck.py"


def test_columns_have_the_same_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "result.json"
    options = ["--tiny", "--device", "cpu", "--steps", "1", "--rounds", "2", "--dtypes", "float32"]
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, *options, "--output", str(output)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    blocks = json.loads(output.read_text())["blocks"]
    assert len(blocks) == 2
    for block in blocks.values():
        assert block["largest_difference"] < 1e-5
        assert set(block["forward and backward"]) == {"torch", "torch, batch norm", "apex", "apex, kept scales"}
        assert block["forward"]["torch"]["times_torch"] == 1
