"""Running the command in a process of its own, with an environment that does not depend on the test runner's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import apex
from tests.support import warm

SOURCE = Path(apex.__file__).resolve().parents[1]
_LEFT_OUT = ("APEX_IMPL", "FORCE_COLOR", "NO_COLOR", "PYTHONPATH", "TERMINAL_WIDTH", "TRITON_INTERPRET")

DOCTOR = ("-m", "apex", "doctor")


def run_quickly(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python arguments...` with this package on the path, in a forked process that has imported PyTorch."""
    return warm.run_python(*arguments, cwd=cwd, environment=_complete(environment))


def _complete(environment: dict[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    return {**inherited, "PYTHONPATH": str(SOURCE), **environment}


def run_python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process with stdout and stderr in pipes."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=_complete(environment),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def words(output: str) -> str:
    """Return output without colours, frames and line breaks, which depend on the terminal of the tests."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[\u2500-\u257f]", " ", output).split())


def write_package(folder: Path, name: str = "apex") -> Path:
    """Write a package that is not this one; return the folder for the path."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("raise ImportError('the wrong package')\n")
    return folder


def write_distribution(folder: Path, version: str, summary: str, entry_points: str = "") -> Path:
    """Write the metadata of an installed distribution called apex."""
    metadata = folder / f"apex-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: apex\nVersion: {version}\nSummary: {summary}\n")
    (metadata / "entry_points.txt").write_text(entry_points)
    return folder
