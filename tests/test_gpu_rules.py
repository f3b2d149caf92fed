"""What CI, which has no GPU, can say about tests that need one: they are found, their calls fit, nothing forks."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.parallel.processes import environment
from tests.support.forks import fork
from tests.support.warm import run_python

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
# What may fork: the one function that does, a server that is started where there is no GPU, what looks whether there is
# one, clients' own environments, and tests that name it in strings.
MAY_FORK = ("support/forks.py", "support/warm.py", "support/test_warm.py", "distributed_testing/suite.py")
FORK = re.compile(r"""\bos\.fork\(|\bfrom os import .*\bfork\b|(get_context\(|start_method=)["']fork["']""")


@functools.cache
def files() -> dict[str, ast.Module]:
    return {path.relative_to(TESTS).as_posix(): ast.parse(path.read_text()) for path in TESTS.rglob("*.py")}


def calls(code: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Return all calls with the last part of the name of what is called."""
    for node in ast.walk(code):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func).rpartition(".")[2], node


def needs_gpu(code: ast.Module) -> bool:
    """Return whether all tests of a module are marked `gpu`."""
    for node in code.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            return "pytest.mark.gpu" in ast.unparse(node.value)
    return False


def test_a_machine_with_pytorch_and_pytest_alone_collects_gpu_tests(tmp_path: Path) -> None:
    """No plugin of pytest, no Hypothesis, no command line: CONTRIBUTING.md promises that a source tree is enough."""
    bare = {**environment(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = run_python("-m", "tests.support.bare", cwd=ROOT, environment=bare, timeout=250)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout[-5000:] + done.stderr[-5000:]
    assert "no tests collected" in done.stdout


def test_processes_are_forked_in_one_way() -> None:
    texts = {name: (TESTS / name).read_text() for name in files() if not name.startswith("clients/")}
    found = {name for name, text in texts.items() if FORK.search(text)} - {*MAY_FORK, "test_gpu_rules.py"}
    assert not found, f"call tests.support.forks.fork(), which refuses where a GPU is visible: {found}"


@pytest.mark.parametrize(
    "code",
    [
        "child = os.fork()",
        "from os import fork",
        "torch.multiprocessing.get_context('fork')",
        'mp.start_processes(f, start_method="fork")',
    ],
)
def test_the_rule_about_forks_can_fail(code: str) -> None:
    assert FORK.search(code)


def test_a_process_that_sees_a_gpu_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(pytest.skip.Exception, match="cannot be forked"):
        fork()


def test_processes_of_gpu_tests_see_the_gpu() -> None:
    """Other processes see none, so that a check could pass on the CPU unnoticed."""
    given = {
        f"{name}:{call.lineno}": needs_gpu(code) == any(keyword.arg == "on_gpu" for keyword in call.keywords)
        for name, code in files().items()
        for called, call in calls(code)
        if called == "run_checks" and name not in ("parallel/processes.py", "parallel/test_processes.py")
    }
    wrong = [place for place, right in given.items() if not right]
    assert not wrong, f"run_checks needs on_gpu=True in modules that are marked `gpu`, and only there: {wrong}"
    assert sum(needs_gpu(code) for code in files().values()) > 10


def test_calls_of_gpu_tests_are_checked_by_types() -> None:
    section = re.search(r"\nmodules = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL)
    assert section is not None
    listed = set(re.findall(r'"tests\.([\w.]+)"', section[1]))
    there = {name for name, code in files().items() if needs_gpu(code) or name.endswith("gpu_checks.py")}
    missing = {name.removesuffix(".py").replace("/", ".") for name in there} - listed
    assert not missing, f"add to `modules` of [tool.mypy] in pyproject.toml, for CI runs none of their tests: {missing}"


def test_hypothesis_is_imported_in_one_place() -> None:
    """Tests of a module that run on a GPU must not need what only its other tests need."""
    found = {
        name
        for name, code in files().items()
        for node in ast.walk(code)
        if (isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "hypothesis")
        or (isinstance(node, ast.Import) and any(alias.name == "hypothesis" for alias in node.names))
    }
    assert found == {"support/drawn.py"}, "import given, settings and st from tests.support.drawn"


def test_the_two_parts_of_the_gpu_selection_are_the_whole() -> None:
    recipes = re.findall(r"\ngpu-\d:.*\n\t(.*)", (ROOT / "Makefile").read_text())
    parts = [recipe.partition("-m gpu ")[2].split() for recipe in recipes]
    folders = parts[0]
    assert all((ROOT / folder).is_dir() for folder in folders)
    assert parts[1:] == [["tests", *(f"--ignore={folder}" for folder in folders)]]
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    assert all(f"pytest -m gpu {' '.join(part)}\n" in guide for part in parts)
