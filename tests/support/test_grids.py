"""Samples of grids have every row and column, and `make grids` runs every file that has a sample."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.support.grids import FULL, pairs

ROOT = Path(__file__).resolve().parents[2]


def test_a_sample_has_every_row_and_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FULL, raising=False)
    assert pairs("ab", (1, 2, 3), each=1) == [("a", 1), ("b", 2)]
    assert pairs("abc", (1, 2, 3), each=2, first=2) == [("a", 3), ("a", 1), ("b", 1), ("b", 2), ("c", 2), ("c", 3)]
    monkeypatch.setenv(FULL, "1")
    assert sorted(pairs("ab", (1, 2), each=1)) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


@functools.cache
def imported(path: Path) -> frozenset[Path]:
    """Return the modules of the tests that a file imports, with their own imports."""
    package, files = path.relative_to(ROOT).parts[:-1], set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ROOT.joinpath(*base, *(node.module or "").split("."))
            files |= {module.with_suffix(".py"), *(module / f"{alias.name}.py" for alias in node.names)}
    files = {file for file in files if file.is_relative_to(ROOT / "tests") and file.is_file()}
    return frozenset(files.union(*map(imported, files)))


def test_the_makefile_lists_every_file_with_a_sample() -> None:
    """Tests of a GPU run all cases anyway, in one process, and the guide's example has no grid."""
    listed = re.search(r"^GRIDS := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed is not None
    sampled = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if ROOT / "tests/support/grids.py" in imported(path)
    }
    assert set(listed[1].replace("\\", "").split()) == {
        name for name in sampled if not name.endswith(("gpu.py", "test_contributing.py", Path(__file__).name))
    }
