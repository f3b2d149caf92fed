"""One-line mutants of the source, and whether tests notice them: `make mutants`, for as long as `--minutes` says.

A mutant is the source with one small fault: a comparison or a constant that is off by one, a statement or a keyword
argument left out, a condition turned round. All mutants of a package are put in a random order of one seed; packages
take turns, so that a run has tried about as many of each when its time is over. The narrowest tests run first, in a
copy of the source, and the first failure ends them. A survivor is a fault that a colleague could make unseen. Lines
that only a GPU or another system runs are left out, and so are messages, annotations and docstrings. Mutants that
nobody could notice are listed in `mutants_settings.py`, each with the reason.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import itertools
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.forks import fork
from tests.support.mutants_settings import CALLS, ELSEWHERE, MESSAGES, OPERATORS, PACKAGES, WITHOUT_EFFECT

ROOT = Path(__file__).resolve().parents[2]


class Mutant(NamedTuple):
    """A source file in which the text from `start` to `end` is exchanged for another."""

    path: str
    source: str
    start: int
    end: int
    text: str

    def changed(self) -> str:
        return self.source[: self.start] + self.text + self.source[self.end :]

    def line(self) -> tuple[int, str, str]:
        """Return the number of the changed line, the line as it was, and as it is."""
        first, last = self.source.rfind("\n", 0, self.start) + 1, self.source.index("\n", self.end)
        changed = self.source[first : self.start] + self.text + self.source[self.end : last]
        return self.source.count("\n", 0, first) + 1, self.source[first:last].strip(), changed.strip()


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Return all mutants of a file, each within one line."""
    found = {Mutant(path, source, *edit) for edit in _edits(source) if "\n" not in source[edit[0] : edit[1]]}
    return sorted(mutant for mutant in found if not ELSEWHERE.search(mutant.line()[1]))


def _edits(source: str) -> Iterator[tuple[int, int, str]]:
    """Yield the begin and the end of a text, and the text that takes its place."""
    lines = source.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]

    def begin(node: Any) -> int:
        return starts[node.lineno - 1] + len(lines[node.lineno - 1].encode()[: node.col_offset].decode())

    def end(node: Any) -> int:
        return starts[node.end_lineno - 1] + len(lines[node.end_lineno - 1].encode()[: node.end_col_offset].decode())

    for node in _nodes(ast.parse(source)):
        if isinstance(node, ast.Compare | ast.BoolOp | ast.BinOp):
            operator = type(node.ops[0] if isinstance(node, ast.Compare) else node.op)
            if operator in OPERATORS:
                old, new = OPERATORS[operator]
                at = source.index(old, end(node.values[0] if isinstance(node, ast.BoolOp) else node.left))
                yield at, at + len(old), new
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield begin(node), begin(node) + len("not "), ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield begin(node), end(node), str(not node.value) if isinstance(node.value, bool) else repr(node.value + 1)
        elif isinstance(node, ast.Call):
            name = _name_of(node.func)
            if name in CALLS:
                yield end(node.func) - len(name), end(node.func), CALLS[name]
            for previous, argument in itertools.pairwise([*node.args, *node.keywords]):
                if isinstance(argument, ast.keyword) and argument.arg:
                    yield end(previous), end(argument), ""
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.Expr) and _changes_state(node):
            yield begin(node), end(node), "pass"
        elif isinstance(node, ast.If | ast.IfExp) and isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
            yield begin(node.test), begin(node.test), "not "


def _nodes(tree: ast.AST) -> Iterator[Any]:
    """Walk through code that computes: without annotations, decorators, errors, messages and docstrings."""
    for name, value in ast.iter_fields(tree):
        nodes = value if isinstance(value, list) else [value]
        for node in nodes if name not in ("annotation", "returns", "decorator_list", "msg") else ():
            says = isinstance(node, ast.Raise | ast.JoinedStr) or _name_of(getattr(node, "func", None)) in MESSAGES
            if isinstance(node, ast.AST) and not says:
                yield node
                yield from _nodes(node)


def _name_of(node: Any) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def _changes_state(statement: Any) -> bool:
    """Return whether code runs on without a statement: a call, or a value that is given to something that exists."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call) and _name_of(statement.value.func) not in MESSAGES
    return isinstance(statement, ast.AugAssign) or isinstance(statement.targets[0], ast.Attribute | ast.Subscript)


class Tree:
    """A copy of the working tree, in which tests run with one file changed."""

    def __init__(self, folder: Path, stages: int, end: float) -> None:
        self.root, self.stages, self.end = folder / "tree", stages, end
        left_out = (".git", ".venv", "__pycache__", ".*_cache", ".site", "dist", "results")
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(*left_out))
        self.places = [str(self.root / place) for place in ("src", "src/compiled_names", ".")]
        # Seconds that a stage of tests may take; 0 if it fails without a mutant, and is left out.
        self.limits: dict[str, float] = {}

    def notices(self, mutant: Mutant) -> bool:
        """Return whether a test fails with the mutant that passes without it."""
        package = next(name for name in PACKAGES if mutant.path.startswith((f"src/apex/{name}/", f"src/apex/{name}.")))
        folders = {Path(test) if "." not in test else Path(test).parent for test in PACKAGES[package][0].split()}
        called_like_it = [folder / f"test_{Path(mutant.path).stem.strip('_')}.py" for folder in folders]
        stages = PACKAGES[package][: self.stages]
        for tests in [*(str(test) for test in called_like_it if (ROOT / test).exists()), *stages]:
            self._write(mutant.path, mutant.changed())
            passed = self.limits.get(tests) == 0 or self._pass(tests)
            self._write(mutant.path, mutant.source)
            if not passed and (tests in self.limits or self._pass(tests)):
                return True
            if self.limits.setdefault(tests, 0) == 0:
                print(f"left out, since they fail without a mutant: {tests}", flush=True)
        return False

    def _write(self, path: str, source: str) -> None:
        """Write a file, and remove its compiled form: that is taken for new if size and second are the same."""
        (self.root / path).write_text(source)
        Path(importlib.util.cache_from_source(self.root / path)).unlink(missing_ok=True)

    def _pass(self, tests: str) -> bool:
        """Run tests, of which the first that fails ends all; they may take three times as long as when they passed."""
        start = time.monotonic()
        limit = min(start + self.limits.get(tests, 600), self.end)
        child = fork()
        if not child:
            self._become(tests)
        ended = status = 0
        while not ended and time.monotonic() < limit:
            time.sleep(0.1)
            ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if not status:
                self.limits.setdefault(tests, 60 + 3 * (time.monotonic() - start))
            return not status
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if time.monotonic() >= self.end:
            raise TimeoutError
        return False

    def _become(self, tests: str) -> None:
        """Run tests in this process, a fork that has imported PyTorch, to its end."""
        status = 1
        try:
            os.setsid()
            for number in (1, 2):
                os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.chdir(self.root)
            os.environ["PYTHONPATH"] = os.pathsep.join(self.places)
            sys.path[:] = [*self.places, *(path for path in sys.path if not path.startswith(str(ROOT / "src")))]
            for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "apex")]:
                del sys.modules[name]
            status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests.split()])
        finally:
            os._exit(status)


def report(possible: dict[str, int], counts: Counter[tuple[str, str]], listed: dict[str, list[str]], run: str) -> str:
    """Return a table of the counts by package and outcome, with survivors and mutants without effect below it."""
    outcomes = ("noticed", "survived", "without effect")
    rows = {package: [possible[package], *(counts[package, each] for each in outcomes)] for package in possible}
    rows["all"] = [sum(numbers) for numbers in zip(*rows.values(), strict=True)]
    widths = "{:26}{:>9}{:>9}{:>10}{:>16}"
    text = [f"One-line mutants: {run}", "", widths.format("package", "possible", *outcomes)]
    text += [widths.format(package, *row) for package, row in rows.items()]
    text += ["", f"Tests noticed {rows['all'][1]} of {sum(rows['all'][1:3])} mutants that change behaviour."]
    for outcome in outcomes[1:]:
        text += ["", f"{outcome}:".capitalize(), *(listed[outcome] or ["none"])]
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15.0, help="the run ends after so many minutes")
    parser.add_argument("--stages", type=int, default=3, help="how many stages of tests; later ones take longer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(PACKAGES), choices=list(PACKAGES), metavar="PACKAGE")
    parser.add_argument("--output", type=Path, help="a file for the table")
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    torch.set_num_threads(1)  # threads are lost in a fork
    os.environ.setdefault("TRITON_INTERPRET", "1")
    importlib.import_module("torch._dynamo")  # which PyTorch's optimizers import
    queues: dict[str, list[Mutant]] = {}
    for package in given.only:
        place = ROOT / "src" / "apex" / package
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
        queues[package] = [m for file in files for m in mutants_of(file.relative_to(ROOT).as_posix(), file.read_text())]
        random.Random(f"{package} {given.seed}").shuffle(queues[package])
    possible = {package: len(queue) for package, queue in queues.items()}
    counts: Counter[Any] = Counter()
    listed: dict[str, list[str]] = {"survived": [], "without effect": [], "noticed": []}
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder), given.stages, end)
        for package in itertools.chain.from_iterable(itertools.repeat(given.only, max(possible.values()))):
            if not queues[package]:
                continue
            start, mutant = time.monotonic(), queues[package].pop()
            number, before, after = mutant.line()
            reason = WITHOUT_EFFECT.get((mutant.path, before, after))
            try:
                outcome = "without effect" if reason else "noticed" if tree.notices(mutant) else "survived"
            except TimeoutError:  # of the whole run
                break
            shown = [f"{mutant.path}:{number}", f"- {before}", f"+ {after}", *([reason] if reason else [])]
            listed[outcome].append("\n    ".join(shown))
            counts[package, outcome] += 1
            print(f"{time.monotonic() - start:4.0f} s  {outcome:14}  {listed[outcome][-1]}", flush=True)
    machine = f"PyTorch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    run = f"{machine}, {os.cpu_count()} cores, seed {given.seed}, {given.minutes:g} minutes, {given.stages} stages"
    text = report(possible, counts, listed, run)
    print(f"\n{text}", end="")
    if given.output is not None:
        given.output.write_text(text)


if __name__ == "__main__":
    main()
