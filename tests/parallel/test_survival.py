"""Long runs in two processes, and the behaviour of the others when a process dies."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from torch import nn

from apex import checkpoint
from apex.parallel import check_replicas
from tests.parallel import survival_checks, victim
from tests.parallel.processes import environment, run_checks
from tests.support.warm import run_python

# Seconds for all runs to start and to stop: a hang is an error. Processes that nobody stops give up after 40.
PATIENCE = 120


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(survival_checks.__name__, Path(tmp_path_factory.mktemp("survival")))


@pytest.mark.parametrize("name", survival_checks.CHECKS)
def test_two_processes(name: str, in_two: dict[str, str]) -> None:
    assert not in_two[name], in_two[name]


def test_replicas_need_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="check_replicas needs a process group"):
        check_replicas(nn.Linear(2, 2))


def assert_last_checkpoint_is_whole(folder: Path) -> None:
    state = checkpoint.Series(folder / "checkpoints").load()
    assert state["step"] == victim.DEATH // victim.EVERY * victim.EVERY
    assert all(tensor.isfinite().all() for tensor in state["model"].values())
    assert state["optimizer"]
    assert not list((folder / "checkpoints").glob(".*"))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with runs of all kinds, in three processes each, whose last rank died."""
    folder = tmp_path_factory.mktemp("killed")
    arguments = (victim.__file__, str(folder), "3", *victim.KINDS)
    done = run_python(*arguments, cwd=folder, environment=environment(), timeout=PATIENCE)
    assert not done.returncode, done.stderr
    return folder


# The message that the others print when the last rank has died.
SAID = {
    "data_parallel": r"gradients? .*",
    "data_parallel_in_streams": r"gradients? .*",
    "zero_mesh": r"adding up a bucket of gradients",
    "zero_adam": r"adding up a bucket of gradients",
    "zero_lamb": r"adding up a bucket of gradients",
    "sync_batch_norm": r"adding up what a batch norm over processes needs for its gradients",
    "sync_batch_norm_in_a_group": r"adding up what a batch norm over processes needs for its gradients",
    "group_batch_norm": r"gathering the statistics of a batch norm over processes",
    "tensor_parallel": r"the all-reduce of an input's gradient \(torch.float32 \[4, 50\] here\)",
}


@pytest.mark.parametrize("kind", victim.KINDS)
def test_the_others_stop_when_one_is_killed(kind: str, killed: Path) -> None:
    """The others stop on their own; only the silence of the dead process tells them."""
    assert json.loads((killed / "ends.json").read_text())[kind] == [1, 1, -signal.SIGKILL]
    for rank in range(2):
        output = (killed / kind / f"rank{rank}.txt").read_text()
        assert re.search(rf"RuntimeError: rank {rank} of 3: .*{SAID[kind]} failed", output), output
        # On a busy machine the other one may take longer to report its failure than this one waits.
        assert re.search(r"no failure is reported by rank ([01], )?2", output), output
        assert "start all processes again from the last checkpoint" in output
    assert_last_checkpoint_is_whole(killed / kind)


@pytest.fixture(scope="module")
def without_the_first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with runs of all kinds, in two processes each, whose first rank was killed or stopped."""
    folder = tmp_path_factory.mktemp("without")
    runs = [f"{kind}.{way}" for kind in victim.KINDS for way in ("stopped", "killed")]
    done = run_python(victim.__file__, str(folder), "2", *runs, cwd=folder, environment=environment(), timeout=PATIENCE)
    assert not done.returncode, done.stderr
    return folder


@pytest.mark.parametrize("way", ["stopped", "killed"])
@pytest.mark.parametrize("kind", victim.KINDS)
def test_the_others_stop_without_the_process_that_has_the_store(kind: str, way: str, without_the_first: Path) -> None:
    """Nobody waits for the store: a process that has it and is stopped would never answer."""
    run = f"{kind}.{way}"
    output = (without_the_first / run / "rank1.txt").read_text()
    assert json.loads((without_the_first / "ends.json").read_text())[run] == [-signal.SIGKILL, 1], output
    assert re.search(r"RuntimeError: rank 1 of 2: .* failed", output), output
    says = "does not answer" if way == "stopped" else "is gone"
    assert f"the process that has the store, as a rule rank 0, {says}" in output, output


# Without an optimizer, with which real processes would import PyTorch's compiler. Rank 1 kills itself in every attempt.
LAUNCHED = f"""
import os, signal
import torch
import torch.distributed as dist
from apex.checkpoint import Series

dist.init_process_group("gloo")
series = Series("checkpoints", keep=2)
weight, first = torch.ones(50), 1
if series.latest() is not None:
    state = series.load()
    weight, first = state["model"]["weight"], state["step"] + 1
    if dist.get_rank() == 0:
        print("goes on at step", first, "with", weight[0].item(), flush=True)
for step in range(first, 100):
    if step == {victim.DEATH} and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(weight)
    if step % {victim.EVERY} == 0:
        series.save({{"step": step, "model": {{"weight": weight}}, "optimizer": {{"step": step}}}}, step, wait=True)
"""


def test_the_launcher_starts_all_again_and_stops_when_one_is_killed(tmp_path: Path) -> None:
    """The second attempt connects its processes anew, goes on from the checkpoint, and is the last one."""
    (tmp_path / "script.py").write_text(LAUNCHED)
    arguments = ("-m", "apex", "run", "--nproc-per-node", "2", "--max-restarts", "1", "script.py")
    done = run_python(*arguments, cwd=tmp_path, environment=environment(), timeout=PATIENCE)
    assert done.returncode == 1, done.stderr
    assert "Signal 9 (SIGKILL)" in done.stderr
    saved = victim.DEATH // victim.EVERY * victim.EVERY
    assert done.stdout == f"goes on at step {saved + 1} with {2.0**saved}\n"
    assert_last_checkpoint_is_whole(tmp_path)
