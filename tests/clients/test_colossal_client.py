"""The runner of Colossal-AI's scripts and tests: its messages for missing arguments, checkouts and packages."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

spec: Any = importlib.util.spec_from_file_location("colossal_client", Path(__file__).with_name("colossal_client.py"))
client = importlib.util.module_from_spec(spec)
spec.loader.exec_module(client)


@pytest.fixture
def checkout(tmp_path: Path) -> str:
    (tmp_path / "tests/test_optimizer").mkdir(parents=True)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("given", "has_gpu", "message"),
    [
        (["no_such"], True, "unknown: no_such"),
        (["--gpu", "CHECKOUT"], False, "--gpu: PyTorch finds no GPU on this machine"),
        (["--gpu", "no such folder"], True, "is no checkout of Colossal-AI"),
        (["--gpu"], True, "usage: "),
    ],
)
def test_wrong_arguments_end_with_a_message(
    given: list[str],
    has_gpu: bool,
    message: str,
    checkout: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLOSSALAI", checkout)
    monkeypatch.setattr(client.torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(sys, "argv", ["client", *[checkout if part == "CHECKOUT" else part for part in given]])
    with pytest.raises(SystemExit) as ended:
        client.arguments()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_gpu_option_runs_three_files(checkout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOSSALAI", "elsewhere")
    monkeypatch.setattr(client.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["client", "--gpu", checkout])
    assert client.arguments() == client.GPU_TESTS
    assert len(client.GPU_TESTS) == 3
    assert set(client.GPU_TESTS) <= set(client.TESTS)
    assert client.original(Path()) == Path(checkout)


@pytest.mark.parametrize(
    ("stdout", "stderr", "message"),
    [("", "No module named pytest\n", "No module named pytest"), ("", "", "pytest printed nothing")],
)
def test_a_run_without_output_fails_by_name(
    stdout: str, stderr: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([], 1, stdout, stderr)
    monkeypatch.setattr(client.subprocess, "run", lambda *args, **options: done)
    with pytest.raises(RuntimeError, match=message):
        client.tested(client.GPU_TESTS[0], Path())
