"""`benchmarks/transformer_block.py` on a tiny block."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "transformer_block.py"


def test_columns_have_the_same_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "result.json"
    options = ["--tiny", "--device", "cpu", "--steps", "1", "--rounds", "2", "--columns", "torch", "apex"]
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, *options, "--output", str(output)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    result = json.loads(output.read_text())
    assert list(result["attention"]) == ["sdpa", "softmax"]
    for columns in result["attention"].values():
        assert set(columns) == {"torch", "apex"}
        assert columns["apex"]["loss"] == pytest.approx(columns["torch"]["loss"], rel=1e-3)
        assert len(columns["apex"]["rounds"]) == 2
        assert columns["apex"]["times_torch"] > 0
