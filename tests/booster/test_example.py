"""The tutorial, as users start it: `apex run` in one and in two processes, in every precision, without warnings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.helpers import run_quickly

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "booster" / "train.py"
PRECISIONS = ("fp16", "fp16_apex", "bf16", "fp8", "fp16_naive")


@pytest.mark.parametrize("processes", ["1", "2"])
def test_tutorial(processes: str, tmp_path: Path) -> None:
    sizes = ("--samples", "64", "--batch", "16", "--width", "4")
    options = ("--nproc-per-node", processes, str(SCRIPT), *sizes, "--mixed-precision", *PRECISIONS)
    result = run_quickly("-m", "apex", "run", *options, cwd=tmp_path, PYTHONWARNINGS="default")
    assert result.returncode == 0, result.stderr
    for name in PRECISIONS:
        losses = [float(found) for found in re.findall(rf" {name}: epoch \d of 2, loss (\d\.\d+)", result.stderr)]
        assert len(losses) == 2, result.stderr
        assert losses[1] < losses[0]
    assert "lr_scheduler" not in result.stderr  # as PyTorch says of a scheduler that was called before the optimizer
    assert not re.search(r"\S*/(apex|examples)/\S*: \w*Warning", result.stderr), result.stderr
