"""The parts of a campaign, with two trials each: they find nothing, and count what they find."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from apex import checkpoint
from tests.campaign.__main__ import report, run
from tests.campaign.trials import in_child
from tests.parallel.processes import environment
from tests.support.warm import run_python

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")


PART = """
import sys
from pathlib import Path
from tests.campaign.__main__ import PARTS
from tests.campaign.trials import Trials

_, part, *options = PARTS[sys.argv[1]]
trials = Trials(sys.argv[1], 2, 0, Path(sys.argv[2]))
part(trials, *options)
assert not trials.failures, trials.failures
assert trials.done == 2
"""


@pytest.mark.parametrize(
    "name", ["threads, files", "damage, a file", "code in files", "links and names elsewhere", "a rank differs"]
)
def test_parts_find_nothing(name: str, tmp_path: Path) -> None:
    """In a process of its own: PyTorch's pool of threads, which another test may have started, is lost in a fork."""
    done = run_python("-c", PART, name, str(tmp_path), cwd=tmp_path, environment=environment())
    assert not done.returncode, done.stderr


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
