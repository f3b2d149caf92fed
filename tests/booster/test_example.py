"""The tutorial in one and in two processes, in every precision, without warnings."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests._cli.helpers import SOURCE
from tests.parallel.processes import launched
from tests.support.warm import run_together

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "booster" / "train.py"
PRECISIONS = ("fp16", "fp16_apex", "bf16", "fp8", "fp16_naive")


SIZES = ("--samples", "64", "--batch", "16", "--width", "4", "--side", "8")


def assert_learned(output: str) -> None:
    for name in PRECISIONS:
        losses = [float(found) for found in re.findall(rf" {name}: epoch \d of 2, loss (\d\.\d+)", output)]
        assert len(losses) == 2, output
        assert losses[1] < losses[0]
    assert "lr_scheduler.step()" not in output  # as PyTorch says of a scheduler that was called before the optimizer
    warned = re.findall(r"\S*/(?:apex|examples)/\S*: \w*Warning: (.*)", output)
    assert [message.split(":")[0] for message in warned] == ["fp8"], output  # a small ResNet has no layer for float8


@pytest.mark.parametrize("processes", [1, 2])
def test_tutorial(processes: int, tmp_path: Path) -> None:
    """Run the tutorial in forked processes with the environment of `apex run`."""
    with launched(processes) as numbers:
        inherited = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONWARNINGS": "default"}
        arguments = (str(SCRIPT), *SIZES, "--mixed-precision", *PRECISIONS)
        results = run_together(
            [arguments] * processes, cwd=tmp_path, environments=[{**inherited, **each} for each in numbers]
        )
    assert not any(result.returncode for result in results), results[0].stderr
    assert_learned(results[0].stderr)
