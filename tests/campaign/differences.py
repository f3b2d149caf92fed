"""Ranks that differ in a campaign: another model, another setting or another input in one rank."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.campaign.trials import Trials, in_children

# Seconds that a rank waits for others: a rank that ends without an error that names the difference is a failure.
PATIENCE = 60


def model_of(change: str) -> nn.Module:
    """Return layers, one of which is wider, in another order or in another dtype if `change` says so."""
    torch.manual_seed(0)
    layers = {"first": nn.Linear(8, 8), "second": nn.Linear(8, 8), "last": nn.Linear(8, 8)}
    if change == "width":
        layers["last"] = nn.Linear(8, 12)
    elif change == "order":
        layers = {name: layers[name] for name in ("second", "first", "last")}
    elif change == "dtype":
        layers["second"].half()
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


def train(booster: Any, change: str) -> None:
    """Boost a model and take a step, with another learning rate or loss scale if `change` says so."""
    model = model_of(change)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, *_ = booster.boost(model, optimizer)
    if change == "lr":
        optimizer.param_groups[0]["lr"] = 0.2
    if change == "loss scale":
        optimizer.scaler.update(4.0)
    booster.backward(model(torch.ones(2, 8)).float().sum(), optimizer)
    optimizer.step()


def boosted(name: str, change: str) -> None:
    """Train with a plugin; a precision of its own in the odd rank if `change` says so."""
    from apex.booster import Booster, plugin

    precision = "bf16" if change == "precision" else "fp16"
    if name in ("LowLevelZeroPlugin", "GeminiPlugin"):
        train(Booster("cpu", plugin=getattr(plugin, name)(precision=precision, initial_scale=256.0)), change)
    else:
        train(Booster("cpu", precision, getattr(plugin, name)()), change)


def data_parallel(change: str) -> None:
    from apex import amp
    from apex.parallel import DistributedDataParallel

    model: Any = model_of("" if change == "dtype" else change)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if change == "lr" else 0.1)
    scale = 16.0 if change == "loss scale" else 8.0
    level = "O4" if change == "precision" else "O1"
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)
    if change == "dtype":  # amp takes float32 models only, and would raise in this rank alone
        model.second.half()
    model = DistributedDataParallel(model)
    with amp.scale_loss(model(torch.ones(2, 8)).float().sum(), optimizer) as loss:
        loss.backward()


def divided_state(name: str, change: str) -> None:
    from apex.contrib import optimizers

    model = model_of(change)
    optimizer = getattr(optimizers, name)([dict(params=model.parameters())], lr=0.1)
    if change == "lr":
        optimizer.param_groups[0]["lr"] = 0.2
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


def sync_batch_norm(change: str) -> None:
    from apex.parallel import SyncBatchNorm

    channels, dtype = (8 if change == "width" else 4), (torch.float64 if change == "dtype" else torch.float32)
    SyncBatchNorm(channels).to(dtype)(torch.randn(2, channels, 3, dtype=dtype))


def pipeline(change: str) -> None:
    from tests.transformer.pipeline_parallel import toy

    with toy.pipeline(dist.get_world_size(), None):
        model = toy.parts_of("1f1b", 1, 1)
        count = 4 if change == "microbatches" else 3
        toy.set_microbatches(count)
        name = "zb_h1" if change == "schedule" else "1f1b"
        toy.STEPS[name](toy.step_function, toy.batch_of(count), model, forward_only=False, tensor_shape=toy.SHAPE)


SETTINGS = ("width", "order", "dtype", "lr", "loss scale", "precision")
KINDS: dict[str, tuple[Callable[[str], None], tuple[str, ...]]] = {
    **{
        name: (functools.partial(boosted, name), SETTINGS)
        for name in ("TorchDDPPlugin", "LowLevelZeroPlugin", "TorchFSDPPlugin", "GeminiPlugin")
    },
    "DistributedDataParallel": (data_parallel, SETTINGS),
    "DistributedFusedAdam": (
        functools.partial(divided_state, "DistributedFusedAdam"),
        ("width", "order", "dtype", "lr"),
    ),
    "DistributedFusedLAMB": (
        functools.partial(divided_state, "DistributedFusedLAMB"),
        ("width", "order", "dtype", "lr"),
    ),
    "SyncBatchNorm": (sync_batch_norm, ("width", "dtype")),
    "pipeline": (pipeline, ("microbatches", "schedule")),
}


def run(kind: str, change: str, odd: int, folder: Path, rank: int, ranks: int) -> str:
    """One rank; returns the error that it raises."""
    torch.set_num_threads(1)
    patience = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=patience)
    try:
        KINDS[kind][0](change if rank == odd else "")
    except RuntimeError as error:
        # Others may still be reading what this one has sent.
        with contextlib.suppress(RuntimeError):
            dist.barrier()
        return str(error)
    return "no error"


def differ(trials: Trials) -> None:
    """One of two to four ranks has another model, setting or input: every rank raises an error that names it."""
    for folder in trials:
        kind = trials.rng.choice(sorted(KINDS))
        change = trials.rng.choice(KINDS[kind][1])
        ranks = trials.rng.randint(2, 4)
        odd = trials.rng.randrange(ranks)
        with trials.expecting(f"{kind}, {change} in rank {odd} of {ranks}"):
            works = [functools.partial(run, kind, change, odd, folder, rank, ranks) for rank in range(ranks)]
            named = rf"rank 0 and rank {odd or 1} (differ|have the same parameters in another order)"
            said = in_children(works)
            assert all(re.search(named, each) for each in said), "\n".join(said)
            trials.outcomes[change] += 1
