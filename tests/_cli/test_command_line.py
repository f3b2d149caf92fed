"""The command itself: version, help, the way to `apex bench`, and what importing costs."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import apex
from apex._cli.app import app

from .helpers import run_python, run_quickly, words


@pytest.fixture
def bench_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return a list that records the calls of `run_bench`."""
    calls: list[tuple[Any, ...]] = []

    def run_bench(families: list[str], **options: Any) -> int:
        calls.append((families, options))
        return 3

    command = types.ModuleType("apex._cli.bench.command")
    command.run_bench = run_bench  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex._cli.bench.command", command)
    return calls


def test_bench_passes_its_options_on_and_exits_with_the_status(bench_calls: list[tuple[Any, ...]]) -> None:
    arguments = ["bench", "norm", "softmax", "--output", "out.json", "--no-plot", "--quick", "--list"]
    arguments += ["--device", "cuda:1", "--filter", "layer", "--all-cores"]
    arguments += ["--sweep", "all", "--cases", "7", "--seed", "8"]
    assert CliRunner().invoke(app, arguments).exit_code == 3
    assert bench_calls == [
        (
            ["norm", "softmax"],
            {
                "output": Path("out.json"),
                "plot": False,
                "quick": True,
                "device": "cuda:1",
                "filter": "layer",
                "list_only": True,
                "all_cores": True,
                "sweep": "all",
                "cases": 7,
                "seed": 8,
            },
        )
    ]


def test_bench_defaults(bench_calls: list[tuple[Any, ...]]) -> None:
    CliRunner().invoke(app, ["bench"])
    off = dict.fromkeys(("quick", "list_only", "all_cores"), False)
    none = dict.fromkeys(("output", "device", "filter", "sweep"))
    assert bench_calls == [([], {"plot": True, "cases": 200, "seed": 0, **none, **off})]


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"apex {apex.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["doctor"], ["demo"], ["bench"], ["run"]])
def test_help(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, [*arguments, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in words(result.stdout)
    assert "Show this message and exit." in words(result.stdout)


def test_help_in_a_pipe_is_plain(tmp_path: Path) -> None:
    result = run_quickly("-m", "apex", "--help", cwd=tmp_path)
    assert result.returncode == 0
    commands = ("doctor", "demo", "bench", "build", "tune", "compare", "migrate", "jit-module", "run")
    assert all(command in result.stdout for command in commands)
    assert "\x1b" not in result.stdout
    assert "╭" not in result.stdout
    assert "..." not in result.stdout.split("Commands:")[1]


def test_importing_apex_imports_nothing_of_the_command_line(tmp_path: Path) -> None:
    code = "import apex, sys; print([n for n in ('typer', 'rich', 'matplotlib', 'apex._cli') if n in sys.modules])"
    assert run_python("-c", code, cwd=tmp_path).stdout == "[]\n"


def test_a_missing_dependency_is_named(tmp_path: Path) -> None:
    code = "import sys; sys.modules['typer'] = None; import apex._cli; apex._cli.main()"
    result = run_quickly("-c", code, cwd=tmp_path)
    assert result.returncode == 1
    assert "pip install typer" in result.stderr
