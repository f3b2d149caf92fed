"""`make test-versions`: the quick half of the tests on the oldest PyTorch and on a later one.

The oldest runs in the oldest Python found, the later one in the newest. `make test-versions TESTS=tests/ops` runs some
of the tests.

Quick is what starts no processes and compiles for no other machine. Each pair of versions has an environment of its own
below `.venv`, which pip fills from the index it is set up with: there PyTorch may come with CUDA, some gigabytes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MINORS = range(10, 14)
# With the triton that each was made for; the older one has none for Arm, and tests of kernels are skipped there.
OLDEST = ("torch==2.6.0", "triton==3.2.0; platform_machine == 'x86_64'")
MIDDLE = ("torch==2.9.1", "triton==3.5.1; platform_system == 'Linux'")
# The interpreter of triton 3.5 takes one-element arrays for numbers, which numpy 2.4 refuses.
TOOLS = ("hatchling", "hypothesis", "matplotlib", "numpy<2.4", "pytest", "pytest-timeout", "rich", "typer")
SLOW = re.compile(r"subprocess|tests\.warm|tests\.parallel\.processes|compile_kernels")


def main() -> int:
    found = pythons() or [sys.executable]
    pairs = [(found[0], OLDEST), (found[-1], MIDDLE)]
    results = [f"{_version(python)}, {packages[0]}: {_tested(python, packages)}" for python, packages in pairs]
    print("\n".join(results))
    return any(not result.endswith("passed") for result in results)


def pythons() -> list[str]:
    """One of each minor version: what a shell finds, or what pyenv has without it being switched on."""
    found = []
    for minor in MINORS:
        places = [shutil.which(f"python3.{minor}"), *Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")]
        working = [
            str(place)
            for place in places
            if place and not subprocess.call([place, "-c", ""], stderr=subprocess.DEVNULL)
        ]
        found += working[:1]
    return found


def _version(python: str) -> str:
    return subprocess.check_output([python, "--version"], text=True).strip()


def _tested(python: str, packages: tuple[str, ...]) -> str:
    """Installs and runs; what came of it."""
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
    command = [own, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"--ignore={path}" for path in away)]
    command += sys.argv[1:]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"})
    return "passed" if done.returncode == 0 else f"failed ({done.returncode})"


if __name__ == "__main__":
    sys.exit(main())
