"""`make test-versions`: the quick half of the tests on the oldest PyTorch, on the newest one and on one between.

Each release has a Python of its own: the oldest 3.10, the newest 3.13. `make test-versions TESTS=tests/ops` runs some
of the tests. A release whose Python is missing here counts as failed.

Quick tests start no processes and compile for no other machine. After them the release's Triton compiles every kernel
for an H100, since its compiler may refuse code that its interpreter runs. Each release has an environment of its own
below `.venv`, which pip fills from the index it is set up with: there PyTorch may come with CUDA, some gigabytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MINORS = range(10, 14)
# Python's minor version, PyTorch, the triton that it was made for, and numpy. Triton 3.2 has no build for Arm, where
# tests of kernels are skipped. The interpreter of triton 3.5 takes one-element arrays for numbers, which numpy 2.4
# refuses.
RELEASES = (
    (10, "torch==2.6.0", "triton==3.2.0; platform_machine == 'x86_64'", "numpy<2.4"),
    (12, "torch==2.9.1", "triton==3.5.1; platform_system == 'Linux'", "numpy<2.4"),
    (13, "torch==2.15.0", "triton==3.9.0; platform_system == 'Linux'", "numpy"),
)
TOOLS = ("hatchling", "hypothesis", "matplotlib", "pytest", "pytest-timeout", "pytest-xdist", "rich", "typer")
SLOW = re.compile(r"subprocess|tests\.support\.warm|tests\.parallel\.processes|compile_kernels")


def main() -> int:
    found = pythons()
    results = []
    for minor, *packages in RELEASES:
        outcome = _tested(found[minor], packages) if minor in found else "failed (this Python is not here)"
        results.append(f"Python 3.{minor}, {packages[0]}: {outcome}")
    print("\n".join(results))
    return any(not result.endswith("passed") for result in results)


def pythons() -> dict[int, str]:
    """Return one working interpreter for each minor version found by the shell or, if not switched on, in pyenv."""
    found = {}
    for minor in MINORS:
        places = [shutil.which(f"python3.{minor}"), *Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")]
        working = [
            str(place)
            for place in places
            if place and not subprocess.call([place, "-c", ""], stderr=subprocess.DEVNULL)
        ]
        if working:
            found[minor] = working[0]
    return found


def _version(python: str) -> str:
    return subprocess.check_output([python, "--version"], text=True).strip()


def _tested(python: str, packages: list[str]) -> str:
    """Install `packages` and the test tools, run the quick tests and return their outcome in words."""
    folder = ROOT / ".venv" / "versions" / f"{_version(python)} {packages[0]}".replace(" ", "-").replace("==", "-")
    own = folder / "bin" / "python"
    if not own.exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
    pins = folder / "constraints.txt"
    pinned = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    pins.write_text("".join(line for line in pinned if not line.startswith(("torch==", "triton==", "numpy=="))))
    quietly = ["--quiet", "--disable-pip-version-check", "--no-compile"]
    subprocess.run([own, "-m", "pip", "install", *quietly, "-c", pins, *TOOLS, *packages], check=True)
    away = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if SLOW.search(path.read_text())]
    sources = os.pathsep.join([str(ROOT / "src"), str(ROOT / "src" / "compiled_names")])
    command = [own, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    command += ["-p", "no:cacheprovider", *(f"--ignore={path}" for path in away)]
    command += sys.argv[1:]
    environment = {**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment)
    if done.returncode:
        return f"failed ({done.returncode})"
    return "passed" if sys.argv[1:] else _compiled(own, environment)


def _compiled(python: Path, environment: dict[str, str]) -> str:
    """Compile every kernel for sm_90, and read each of its branches; return the outcome in words."""
    asked = "import sys; from apex.ops._library import triton_problem; sys.exit(triton_problem() is not None)"
    if subprocess.call([python, "-c", asked], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL):
        return "passed"  # without Triton, or with one that is too old, users get no kernels
    command = [python, "-m", "tests.ops.compile_kernels", "--every-branch", "sm_90"]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    failures = json.loads(done.stdout)["sm_90"]["failures"] if done.returncode == 0 else [f"exit {done.returncode}"]
    return f"failed ({len(failures)} kernels do not compile: {failures[0]})" if failures else "passed"


if __name__ == "__main__":
    sys.exit(main())
