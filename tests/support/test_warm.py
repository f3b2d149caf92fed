"""Forks are as processes: many tests ask them whether something went wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support import warm


def run(*arguments: str, cwd: Path, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    return warm.run_python(*arguments, cwd=cwd, environment={**os.environ, **environment}, timeout=timeout)


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(5)", 5, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit('not today')", 1, "not today\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import atexit; atexit.register(print, 'end', flush=True); 1 / 0", 1, "ZeroDivisionError"),
    ],
)
def test_how_they_end(code: str, status: int, said: str, tmp_path: Path) -> None:
    done = run("-c", code, cwd=tmp_path)
    assert done.returncode == status
    assert said in done.stderr
    assert bool(done.stderr) == bool(said)
    assert done.stdout == ("end\n" if "atexit" in code else "")


def test_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    code = (
        "import json, os, sys\n"
        "facts = [__name__, sys.argv, sys.path[:2], os.getcwd(), os.environ['WORD'], 'apex' in sys.modules]\n"
        "print(json.dumps(facts))"
    )
    for place in (tmp_path, tmp_path / "package"):
        (place / "script.py").write_text(code)
    other = str(tmp_path / "other")
    here, there = str(tmp_path), str(tmp_path / "package")
    for arguments, name, start in (
        (("-c", code, "x"), "-c", here),
        (("-m", "script", "x"), str(tmp_path / "script.py"), here),
        (("script.py", "x"), "script.py", here),
        ((f"{there}/script.py", "x"), f"{there}/script.py", there),
    ):
        done = run(*arguments, cwd=tmp_path, PYTHONPATH=other, WORD="yes")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == ["__main__", [name, "x"], [start, other], here, "yes", False]


def test_several_at_once(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['RANK']); sys.exit(int(os.environ['RANK']))"
    environments = [{**os.environ, "RANK": str(rank)} for rank in range(3)]
    done = warm.run_together([("-c", code)] * 3, cwd=tmp_path, environments=environments)
    assert [(each.returncode, each.stdout) for each in done] == [(rank, f"{rank}\n") for rank in range(3)]


def test_the_late_are_killed_with_their_children(tmp_path: Path) -> None:
    code = "import os, time; print('begun', flush=True); os.fork(); time.sleep(100)"
    with pytest.raises(subprocess.TimeoutExpired) as late:
        run("-c", code, cwd=tmp_path, timeout=1)
    assert late.value.output == "begun\n"
    assert run("-c", "print('next')", cwd=tmp_path).stdout == "next\n"


def test_answers_that_come_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork may have ended before anyone looks for its number."""
    answer = warm._ForkServer._answer

    def late(server: warm._ForkServer) -> list[int]:
        time.sleep(0.5)
        return answer(server)

    monkeypatch.setattr(warm._ForkServer, "_answer", late)
    assert run("-c", "print('done')", cwd=tmp_path, timeout=5).stdout == "done\n"
