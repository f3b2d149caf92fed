"""The parts of a campaign, with two trials each: they find nothing, and count what they find."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from apex import checkpoint
from tests.campaign.__main__ import PARTS, report, run
from tests.campaign.trials import Trials, in_child

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")


@pytest.mark.parametrize("name", ["threads, files", "damage, a file", "code in files"])
def test_parts_find_nothing(name: str, tmp_path: Path) -> None:
    _, part, *options = PARTS[name]
    trials = Trials(name, 2, 0, tmp_path)
    part(trials, *options)
    assert not trials.failures, trials.failures
    assert trials.done == 2


def test_calls_are_more_in_a_larger_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'all    15   9   6   0'\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    found = run("calls", 3, 0)
    assert (found["trials"], found["failed"], found["of"]) == (45, 0, {"worked": 27, "refused": 18})


def test_what_fails_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "load", lambda path: {"weights": None})
    found = run("damage, a file", 0.005, 0)
    assert (found["trials"], found["failed"]) == (3, 3)
    assert "TypeError" in found["failures"][0]
    assert "damage, a file                       3       3" in report([found], 0)
    assert in_child(lambda: os._exit(3) or "") == "ended with 3; "
