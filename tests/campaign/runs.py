"""Training in a campaign: ranks that die or stop, overflows, and random calls."""

from __future__ import annotations

import datetime
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from apex import checkpoint
from tests.campaign.trials import Trials
from tests.parallel import victim
from tests.support.forks import fork

# The largest loss scale at which gradients of the small model overflow only where they are made to.
CEILING = 2.0**13


def ranks(trials: Trials, number: int) -> None:
    """One of three ranks dies or stops in a random step: the others raise an error that says so, and end.

    Every trial is one run of each kind at once. The last checkpoint is whole.
    """
    for folder in trials:
        victim.SIGNAL = number
        victim.DEATH = trials.rng.randint(6, 14)
        victim.VICTIM = trials.rng.randint(1, 3)
        victim.PATIENCE = datetime.timedelta(seconds=40 if number == signal.SIGKILL else 15)
        children: dict[int, tuple[str, int]] = {}
        for kind in victim.KINDS:
            (folder / kind).mkdir()
            for rank in range(3):
                child = fork()
                if not child:
                    os._exit(victim.run(kind, folder / kind, rank, 3))
                children[child] = kind, rank
        doomed = 3 - victim.VICTIM
        deadline = time.monotonic() + 200
        waiting = dict(children)
        ends: dict[tuple[str, int], int] = {}
        while waiting:
            for child, (kind, rank) in list(waiting.items()):
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    del waiting[child]
                    ends[kind, rank] = os.waitstatus_to_exitcode(status)
            late = time.monotonic() > deadline
            if late or all(rank == doomed for _, rank in waiting.values()):
                for child in waiting:
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.05)
        for kind in victim.KINDS:
            with trials.expecting(f"{kind}, rank {doomed} in step {victim.DEATH}"):
                for rank in range(3):
                    expected = -signal.SIGKILL if rank == doomed else 1
                    output = (folder / kind / f"rank{rank}.txt").read_text()
                    assert ends[kind, rank] == expected, f"rank {rank} ended with {ends[kind, rank]}\n{output[-2000:]}"
                    if rank != doomed:
                        assert re.search(rf"RuntimeError: rank {rank} of 3: .* failed", output), output[-2000:]
                state = checkpoint.Series(folder / kind / "checkpoints").load()
                assert state["step"] == (victim.DEATH - 1) // victim.EVERY * victim.EVERY, state["step"]
                trials.outcomes[kind] += 1


def overflow(trials: Trials) -> None:
    """Random overflows in training: the loss scale follows upstream's rule, and those steps change no parameter."""
    from apex import amp, optimizers
    from tests.amp import common
    from tests.amp.test_scaler import Model

    makers: dict[str, Callable[[Any], Any]] = {
        "torch SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
        "torch Adam": lambda params: torch.optim.Adam(params, lr=0.01),
        "FusedSGD": lambda params: optimizers.FusedSGD(params, lr=0.01, momentum=0.9),
        "FusedAdam": lambda params: optimizers.FusedAdam(params, lr=0.01),
        "FusedLAMB": lambda params: optimizers.FusedLAMB(params, lr=0.01),
        "FusedNovoGrad": lambda params: optimizers.FusedNovoGrad(params, lr=0.01),
    }
    rng = trials.rng
    for _ in trials:
        name, level = rng.choice(sorted(makers)), rng.choice(("O1", "O2"))
        window, start = rng.randint(1, 6), 2.0 ** rng.randint(0, 12)
        floor = rng.choice((None, 2.0 ** rng.randint(-3, 4)))
        rate = rng.choice((0.05, 0.3, 0.7))
        bad = {step for step in range(30) if rng.random() < rate}
        with trials.expecting(f"{name} {level} window={window} start={start} floor={floor} bad={sorted(bad)}"):
            model = common.small_model()
            bounds = {"min_loss_scale": floor, "max_loss_scale": CEILING}
            options = {"dynamic_init_scale": start, "scale_window": window, **bounds}
            model, optimizer = common.quiet(model, makers[name](model.parameters()), opt_level=level, **options)
            theirs = Model(start, window, floor, CEILING, 2.0, 0.5)
            for step in range(30):
                before = common.values(amp.master_params(optimizer))
                common.train(model, optimizer, [step], common.overflow_at(*bad))
                theirs.update(step in bad)
                found = amp.state_dict()["loss_scaler0"]
                assert found == {"loss_scale": theirs.scale, "unskipped": theirs.good}, (step, found, theirs.scale)
                same = all(map(torch.equal, before, amp.master_params(optimizer)))
                assert same == (step in bad), f"step {step} {'changed' if step in bad else 'did not change'} parameters"
            trials.outcomes["skipped steps"] += len(bad)
            trials.outcomes["steps"] += 30
        amp.shutdown()


def calls(trials: Trials) -> None:
    """Random calls of the public classes: each works, or is refused and changes nothing."""
    path = Path(__file__).parents[1] / "test_properties.py"
    for number in range(trials.count):
        seed = f"--hypothesis-seed={trials.seed + number}"
        options = ["--hypothesis-profile=campaign", seed, "--timeout=0", "-s", "-q"]
        command = [sys.executable, "-m", "pytest", os.fspath(path), *options]
        with trials.expecting(" ".join(command)):
            pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(command, cwd=path.parents[1], text=True, **pipes)
            assert process.stdout is not None
            output = ""
            for line in process.stdout:
                output += line
                print(f"  {trials.name}: {line}", end="", flush=True)
                if found := re.match(r"all +(\d+) +(\d+) +(\d+) +(\d+)", line):
                    trials.done += int(found[1])
                    trials.outcomes.update(worked=int(found[2]), refused=int(found[3]))
            assert process.wait() == 0, output[-20_000:]
