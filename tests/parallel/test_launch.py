"""`apex run` and `python -m apex.parallel.multiproc`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from apex import _env
from apex._cli.app import app
from apex.parallel import _torchrun, multiproc
from tests._cli.helpers import run_quickly

RECORDED = ["--module", "apex.parallel._recorded"]  # runs the script, and records the error that ends it
SCRIPT = """
import json, sys
import torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
facts = {"arguments": sys.argv[1:], "name": __name__, "path": sys.path[0], "size": dist.get_world_size()}
print(f"rank {dist.get_rank()} speaks")
Path(f"{dist.get_rank()}.json").write_text(json.dumps(facts))
dist.barrier()
dist.destroy_process_group()
sys.exit(5 if "--fail" in sys.argv and "1" == sys.argv[-1] else 0)
"""


def test_multiproc_starts_processes(tmp_path: Path) -> None:
    """Processes get their numbers as arguments, and the exit status is the failed process's."""
    (tmp_path / "script.py").write_text(SCRIPT)
    result = run_quickly(
        "-m", "apex.parallel.multiproc", "script.py", "--world-size", "2", "--lr", "0.1", "--fail", cwd=tmp_path
    )
    assert result.returncode == 5, result.stderr
    assert "rank 1 failed first: exit status 5" in result.stderr
    for rank in range(2):
        facts = json.loads((tmp_path / f"{rank}.json").read_text())
        assert facts["arguments"] == ["--world-size", "2", "--lr", "0.1", "--fail", "--rank", str(rank)]
        assert facts["name"] == "__main__"
        assert facts["path"] == str(tmp_path)
        assert facts["size"] == 2
    assert "rank 0 speaks" in result.stdout
    assert "rank 1 speaks" not in result.stdout
    assert (tmp_path / "GPU_1.log").read_text().endswith("rank 1 speaks\n")  # Gloo of PyTorch 2.9 speaks, too


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the command lines that torchrun gets."""
    calls: list[list[str]] = []

    def torchrun(arguments: list[str]) -> int:
        calls.append(list(arguments))
        return 4

    for module in (_torchrun, multiproc):
        monkeypatch.setattr(module, "torchrun", torchrun)
        monkeypatch.setattr(module, "local_devices", lambda: 3)
    return calls


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["s.py"], ["--nproc-per-node=3", "--standalone", *RECORDED, "s.py"]),
        (
            ["--nproc-per-node", "2", "s.py", "--lr", "1", "--nproc-per-node", "9", "-m"],
            ["--nproc-per-node=2", "--standalone", *RECORDED, "s.py", "--lr", "1", "--nproc-per-node", "9", "-m"],
        ),
        (
            ["-m", "package.main", "x"],
            ["--nproc-per-node=3", "--standalone", *RECORDED, "--module", "package.main", "x"],
        ),
        (
            ["--nnodes", "2", "--node-rank", "1", "--master-addr", "host", "s.py"],
            [
                "--nproc-per-node=3",
                "--nnodes=2",
                "--node-rank=1",
                "--master-addr=host",
                "--master-port=29500",
                *RECORDED,
                "s.py",
            ],
        ),
        (
            ["--master-port", "1234", "s.py"],
            [
                "--nproc-per-node=3",
                "--nnodes=1",
                "--node-rank=0",
                "--master-addr=localhost",
                "--master-port=1234",
                *RECORDED,
                "s.py",
            ],
        ),
    ],
)
def test_run_is_torchrun(
    given: list[str], expected: list[str], started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").touch()
    assert CliRunner().invoke(app, ["run", *given]).exit_code == 4
    assert started == [expected]


@pytest.mark.parametrize("given", [[], ["--nproc-per-node", "0", "s.py"], ["--nnodes", "2", "s.py"]])
def test_run_explains_errors(given: list[str], started: list[list[str]]) -> None:
    result = CliRunner().invoke(app, ["run", *given])
    assert result.exit_code == 2
    assert "`apex run --help`" in result.stderr
    assert started == []


def test_multiproc_counts_processes(started: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert multiproc.main(["s.py", "-x"]) == 4
    assert multiproc.main(["s.py", "--world-size", "5"]) == 4
    first = ["--standalone", "--nproc-per-node=3", "-m", "apex.parallel.multiproc", "s.py", "-x"]
    second = ["--standalone", "--nproc-per-node=5", "-m", "apex.parallel.multiproc", "s.py", "--world-size", "5"]
    assert started == [first, second]
    assert multiproc.main(["s.py", "--world-size=5"]) == 4
    assert started.pop() == [*second[:5], "--world-size=5"]
    assert multiproc.main(["s.py", "--world-size", "many"]) == 2
    assert "--world-size many" in capsys.readouterr().err
    assert multiproc.main([]) == 2
    assert multiproc.main(["--help"]) == 0
    assert "usage:" in capsys.readouterr().out
    assert len(started) == 2


def test_multiproc_replaces_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; found = sys.argv")
    seen: list[Any] = []
    monkeypatch.setattr(multiproc.runpy, "run_path", lambda path, run_name: seen.append((path, run_name, sys.argv)))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [""])
    for given in (["--rank", "7", "-v", "--world-size", "8"], ["--rank=7", "-v", "--world-size=8"]):
        multiproc.run_script([str(script), *given], 0, 2)
        assert seen.pop() == (str(script), "__main__", [str(script), "--rank", "0", "-v", "--world-size", "2"])
    assert sys.path == [str(tmp_path)]


def test_numbers_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert _env.torchrun_numbers() is None
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("RANK", "3"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert _env.torchrun_numbers() == (3, 4)


def test_devices_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, count, expected in ((False, 0, 1), (True, 4, 4)):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda available=available: available)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda count=count: count)
        assert _torchrun.local_devices() == expected
