"""Runs of the Booster in which one rank kills itself, in a step or in a save; started by test_processes.py.

Argument: a folder. This process imports everything and divides, into the ranks of every run. Each run has a folder of
its own with what its ranks printed and the checkpoints of its cases; `ends.json` has the exit codes of its ranks.

- "alive" is not killed;
- "backward", "save" and "writer" are: in a backward pass, in a save, together with the process that writes for it;
- "resumed" goes on from their last checkpoints, in as many processes;
- "exact" is killed too, and "exact alone" and "exact in four" go on from it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex import amp, checkpoint
from apex.booster import Booster, checkpoint_io
from apex.checkpoint import _background
from apex.nn.lr_scheduler import LinearWarmupLR
from tests.booster.problem import adam, net, train
from tests.booster.process_checks import PLUGINS, needs_fsdp
from tests.support.forked_ranks import die, start

# The plugin, the precision and the rank that dies, of each killed run.
KILLED = {
    "backward": ("zero 1", "fp16_naive", 1),
    "save": ("ddp", "fp16", 0),
    "writer": ("fsdp" if needs_fsdp else "zero 2", "fp16", 0),
}
EXACT = ("ddp", "zero 1", "zero 2", *(["fsdp", "gemini"] if needs_fsdp else []))
RUNS = {"alive": 2, **dict.fromkeys(KILLED, 2), "resumed": 2, "exact": 2, "exact alone": 1, "exact in four": 4}
SAVED, LAST = 2, 4
EXACT_LAST = 3


def train_case(name: str, plugin: str, precision: str, folder: Path, victim: bool) -> None:
    """Train from the newest checkpoint to the last step and save after every step; a victim dies after `SAVED`."""
    booster, model = PLUGINS[plugin](precision), net()
    optimizer = adam(model)
    parts = booster.boost(model, optimizer, nn.CrossEntropyLoss(), None, LinearWarmupLR(optimizer, 8, 2))
    done = load_newest(booster, parts, folder)
    for step in range(done, LAST):
        if victim and step == SAVED:
            arm(name, parts[0])
        train(booster, parts, range(step, step + 1), dist.get_rank(), dist.get_world_size())
        parts[4].step()
        save(booster, parts, folder / str(step + 1), use_async=name == "writer")
    booster.wait_for_saves()
    amp.shutdown()


def arm(name: str, model: nn.Module) -> None:
    """Make this process die in the next step, or in the save after it with half of the optimizer written."""
    if name == "backward":
        next(model.parameters()).register_hook(die)
        return
    if name == "writer":
        submit = checkpoint_io.submit

        def die_with_writer(*args: Any, **options: Any) -> None:
            if args[1].name != "optimizer":
                submit(*args, **options)
                return
            checkpoint.wait()  # for the model
            writer = _background._writer_of_process._process.pid
            os.kill(writer, signal.SIGSTOP)
            submit(*args, **options)
            os.kill(writer, signal.SIGKILL)
            die()

        checkpoint_io.submit = die_with_writer
        return
    write = torch.save

    def die_in_optimizer(state: Any, path: Any) -> None:
        write(state, path)
        if "pytorch_optim" in str(path):
            die()

    torch.save = die_in_optimizer


def save(booster: Booster, parts: tuple[Any, ...], folder: Path, use_async: bool) -> None:
    """Save all parts, the optimizer last: a checkpoint with an optimizer is complete."""
    booster.save_lr_scheduler(parts[4], folder / "scheduler")
    booster.save_model(parts[0], folder / "model", use_async=use_async)
    booster.save_optimizer(parts[1], folder / "optimizer", shard=True, size_per_shard=0, use_async=use_async)


def load_newest(booster: Booster, parts: tuple[Any, ...], folder: Path) -> int:
    """Load the newest complete checkpoint; return the step that it was saved after."""
    step = max((int(path.parent.name) for path in folder.glob("*/optimizer")), default=0)
    if step:
        booster.load_model(parts[0], folder / str(step) / "model")
        booster.load_optimizer(parts[1], folder / str(step) / "optimizer")
        booster.load_lr_scheduler(parts[4], folder / str(step) / "scheduler")
    return step


# Sums that are not rounded depend neither on their order nor on how many processes have terms of them: what goes on in
# another number of processes then equals plain PyTorch to the bit, and shows that nothing is lost but roundings.


def exact_net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 4, bias=False))
    nn.init.zeros_(model[0].weight)
    return model


def exact_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randint(-1, 2, (16, 8), generator=generator).float()
    return inputs, torch.randint(-2, 3, (16, 4), generator=generator).float()


def train_exactly(name: str, plugin: str, folder: Path) -> None:
    booster, model = PLUGINS[plugin]("fp32"), exact_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    parts = booster.boost(model, optimizer, nn.MSELoss(), None, LinearWarmupLR(optimizer, 4, 0))
    for group in parts[1].param_groups:
        group["lr"] = 0.25  # the rates of schedulers are no powers of two
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(load_newest(booster, parts, folder), EXACT_LAST):
        parts[1].zero_grad()
        inputs, targets = (tensor[rank::ranks] for tensor in exact_batch(step))
        booster.backward(parts[2](parts[0](inputs), targets), parts[1])
        parts[1].step()
        save(booster, parts, folder / str(step + 1), use_async=False)
        if name == "exact" and step + 1 == SAVED:
            break


def run(name: str, folder: Path) -> None:
    if name.startswith("exact"):
        for plugin in EXACT:
            train_exactly(name, plugin, folder / plugin)
        if name == "exact":
            die()
        return
    for case, (plugin, precision, victim) in KILLED.items():
        if name in (case, "alive", "resumed"):
            train_case(name, plugin, precision, folder / case, name == case and victim == dist.get_rank())


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    first = ("alive", *KILLED, "exact")
    ends = start({name: RUNS[name] for name in first}, place, run)
    for case in KILLED:
        shutil.copytree(place / case / case, place / "resumed" / case)
    for case in ("exact alone", "exact in four"):
        shutil.copytree(place / "exact", place / case, ignore=shutil.ignore_patterns("store", "*.txt"))
    ends |= start({name: RUNS[name] for name in RUNS if name not in first}, place, run)
    (place / "ends.json").write_text(json.dumps(ends))
