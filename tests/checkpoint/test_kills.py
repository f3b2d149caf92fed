"""Processes that are killed while they save leave the newest checkpoint and those before it readable."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import apex
from tests.checkpoint import kills
from tests.support.warm import run_python

SOURCE = Path(apex.__file__).resolve().parents[1]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
@pytest.mark.parametrize(("kind", "count"), [("file", 50), ("sharded", 10), ("asynchronous", 10)])
def test_killed_at_any_moment(kind: str, count: int, tmp_path: Path) -> None:
    arguments = (kills.__file__, str(tmp_path / "run"), str(count), kind)
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{ROOT}"}
    result = run_python(*arguments, cwd=tmp_path, environment=environment, timeout=200)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    # Kills did hit processes that were saving, and nothing of that is left.
    assert report["cut_short"] >= 0.8 * count
    assert report["leftovers"] > 0
    assert not [name for name in report["remaining"] if name.endswith(".tmp")]
    assert len(report["remaining"]) == min(kills.KEEP, report["saved"] + 2)
