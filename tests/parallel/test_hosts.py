"""`apex run` on several machines: their selection, and the command that is started on each."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from apex._cli.app import app
from apex.parallel import _hosts
from apex.parallel._hosts import chosen_hosts, extra_arguments


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text("one slots=8\n\n# a remark\ntwo  # another\nthree\n")
    return path


def test_machines_are_chosen(hostfile: Path) -> None:
    assert chosen_hosts(None, None, None, None, -1) == []
    assert chosen_hosts("a, b", None, None, None, -1) == ["a", "b"]
    assert chosen_hosts(None, hostfile, None, None, -1) == ["one", "two", "three"]
    assert chosen_hosts(None, hostfile, "three,one", None, -1) == ["one", "three"]
    assert chosen_hosts(None, hostfile, None, "one", 1) == ["two"]
    assert extra_arguments("rdzv_backend=c10d, max_restarts=2") == ["--rdzv_backend=c10d", "--max_restarts=2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "a", "--hostfile", "hosts"], "give one of them"),
        (["--hostfile", "hosts", "--include", "one", "--exclude", "two"], "cannot be used together"),
        (["--include", "one"], "--hostfile, which is missing"),
        (["--hostfile", "nothing"], "--hostfile='nothing' is not a file"),
        (["--hostfile", "hosts", "--include", "four"], "--include names four"),
        (["--hostfile", "hosts", "--num-nodes", "4"], "--num-nodes=4 must be -1, or between 1 and"),
        (["--hostfile", "hosts", "--exclude", "one,two,three"], "no machine is left"),
        (["--hostfile", "options"], "'-oProxyCommand=touch' is no name of a machine"),
        (["--host", "one,-oProxyCommand=touch"], "'-oProxyCommand=touch' is no name of a machine"),
        (["--extra-launch-args", "alone"], "alone, which is not name=value"),
        (["--hostfile", "binary"], "--hostfile='binary' is no text"),
        (["--num-nodes", "2"], "of --host or --hostfile, which are missing"),
        (["--ssh-port", "22"], "--ssh-port is for machines"),
        (["--ssh-port", "0", "--host", "a"], "Invalid value for '--ssh-port'"),
        (["--master-port", "65536"], "Invalid value for '--master-port'"),
        (["--node-rank", "1"], "--node-rank=1 is not one of 1 machines"),
        (["--node-rank", "2", "--nnodes", "2", "--master-addr", "a"], "--node-rank=2 is not one of 2 machines"),
        (["--nnodes", "2", "--master-addr", "a", "--host", "a,b"], "--nnodes and --node-rank follow from the machines"),
    ],
)
def test_options_are_checked(options: list[str], message: str, hostfile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(hostfile.parent)
    Path("binary").write_bytes(b"\x7fELF\xd0\x00")
    Path("options").write_text("one\n-oProxyCommand=touch here\n")
    result = CliRunner().invoke(app, ["run", *options, "script.py"])
    assert result.exit_code == 2
    text = " ".join(result.output.replace("│", " ").split())
    assert message in text


SSH = """#!{python}
import json, os, sys, time
rank = sys.argv[-1].split("--node-rank=")[1].split()[0]
with open("ssh" + rank + ".json", "w") as file:
    json.dump(sys.argv[1:], file)
if "wait" in sys.argv[-1] and rank == "0":
    time.sleep(60)
sys.exit(int(rank) * 3)
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install an ssh that records its arguments and fails on the second machine with status 3."""
    command = tmp_path / "bin" / "ssh"
    command.parent.mkdir()
    command.write_text(SSH.format(python=sys.executable))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_machine_gets_the_command(ssh: Path) -> None:
    options = [
        "--host",
        "one,two",
        "--nproc_per_node",
        "2",
        "--ssh-port",
        "23",
        "--extra_launch_args",
        "max_restarts=1",
    ]
    result = CliRunner().invoke(app, ["run", *options, "-m", "package.train", "--lr", "a b"])
    assert result.exit_code == 3
    for rank, host in enumerate(("one", "two")):
        *before, there = json.loads((ssh / f"ssh{rank}.json").read_text())
        assert before == ["-tt", "-p", "23", host]
        assert there == (
            f"cd {ssh} && exec {sys.executable} -m apex run --nproc-per-node=2 --master-port=29500 "
            f"--extra-launch-args=max_restarts=1 --master-addr=one --nnodes=2 --node-rank={rank} --module "
            "package.train --lr 'a b'"
        )


def test_a_failure_ends_the_others(ssh: Path) -> None:
    result = CliRunner().invoke(app, ["run", "-H", "one,two", "--nproc-per-node", "1", "wait.py"])
    assert result.exit_code == 3


def test_one_machine_that_is_this_one_needs_no_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    calls: list[list[str]] = []
    monkeypatch.setattr("apex.parallel._torchrun.torchrun", lambda arguments: calls.append(arguments) or 0)
    monkeypatch.setattr(_hosts, "run_on", None)
    options = ["--host", "localhost", "--nproc_per_node", "2", "--extra_launch_args", "monitor_interval=1"]
    assert CliRunner().invoke(app, ["run", *options, "script.py", "--host", "x"]).exit_code == 0
    recorded = ["--module", "apex.parallel._recorded", "script.py", "--host", "x"]
    assert calls.pop() == ["--nproc-per-node=2", "--standalone", "--monitor_interval=1", *recorded]
    options = ["--nproc-per-node", "2", "--max-restarts", "3"]
    assert CliRunner().invoke(app, ["run", *options, "-m", "package", "x"]).exit_code == 0
    recorded = ["--module", "apex.parallel._recorded", "--module", "package", "x"]
    assert calls.pop() == ["--nproc-per-node=2", "--max-restarts=3", "--standalone", *recorded]
    # Machines that come and go meet at the first one, and have no numbers.
    options = ["--nproc-per-node", "2", "--nnodes", "1:4", "--master-addr", "here", "--master-port", "1234"]
    assert CliRunner().invoke(app, ["run", *options, "other"]).exit_code == 0
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=here:1234", "--rdzv-id=apex"]
    assert calls.pop() == ["--nproc-per-node=2", "--nnodes=1:4", *meeting, "other"]


@pytest.mark.parametrize("nnodes", ["0", "4:1", "x"])
def test_wrong_numbers_of_machines(nnodes: str) -> None:
    result = CliRunner().invoke(app, ["run", "--nnodes", nnodes, "script.py"])
    assert result.exit_code == 2
    assert f"{nnodes!r} is no number of machines" in result.output
