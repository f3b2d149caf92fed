"""Processes that are killed while they save leave the newest checkpoint readable, and those before it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import apex
from tests.checkpoint import kills

SOURCE = Path(apex.__file__).resolve().parents[1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
@pytest.mark.parametrize(("kind", "count"), [("file", 50), ("sharded", 10)])
def test_killed_at_any_moment(kind: str, count: int, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, kills.__file__, str(tmp_path / "run"), str(count), kind],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    # Kills did hit processes that were saving, and nothing of that is left.
    assert report["cut_short"] >= 0.8 * count
    assert report["leftovers"] > 0
    assert not [name for name in report["remaining"] if name.endswith(".tmp")]
    assert len(report["remaining"]) == min(kills.KEEP, report["saved"] + 2)
