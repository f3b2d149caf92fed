"""The tutorial, as users start it: `apex run` in one and in two processes, in every precision, without warnings."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.cli.helpers import SOURCE, run_quickly
from tests.parallel.processes import launched
from tests.warm import run_python

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "booster" / "train.py"
PRECISIONS = ("fp16", "fp16_apex", "bf16", "fp8", "fp16_naive")


SIZES = ("--samples", "64", "--batch", "16", "--width", "4", "--side", "8")


def assert_learned(output: str) -> None:
    for name in PRECISIONS:
        losses = [float(found) for found in re.findall(rf" {name}: epoch \d of 2, loss (\d\.\d+)", output)]
        assert len(losses) == 2, output
        assert losses[1] < losses[0]
    assert "lr_scheduler" not in output  # as PyTorch says of a scheduler that was called before the optimizer
    assert not re.search(r"\S*/(apex|examples)/\S*: \w*Warning", output), output


def test_tutorial(tmp_path: Path) -> None:
    options = ("--nproc-per-node", "2", str(SCRIPT), *SIZES, "--mixed-precision", *PRECISIONS)
    result = run_quickly("-m", "apex", "run", *options, cwd=tmp_path, PYTHONWARNINGS="default")
    assert result.returncode == 0, result.stderr
    assert_learned(result.stderr)


def test_tutorial_in_one_process(tmp_path: Path) -> None:
    """With the numbers that `apex run` gives it, and nothing imported anew."""
    with launched(1) as (numbers,):
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONWARNINGS": "default", **numbers}
        arguments = (str(SCRIPT), *SIZES, "--mixed-precision", *PRECISIONS)
        result = run_python(*arguments, cwd=tmp_path, environment=environment)
    assert result.returncode == 0, result.stderr
    assert_learned(result.stderr)
