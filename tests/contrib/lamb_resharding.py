"""Checkpoints of DistributedFusedLAMB that are written by four processes, then by two, and read by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as checkpoint
from torch import nn

from tests.contrib.lamb_problem import assert_solved, distributed_step, made, parameters
from tests.parallel.processes import Check


def shared(name: str) -> Path:
    """A folder beside those of the processes of one run."""
    return Path.cwd().parent / f"lamb_{name}"


def saves(name: str, **options: Any) -> Check:
    """Two steps, then a checkpoint."""

    def check(rank: int) -> None:
        params = parameters()
        optimizer = made(params, **options)
        for step in range(2):
            distributed_step(optimizer, params, step)
        checkpoint.save({"optimizer": optimizer.sharded_state_dict()}, checkpoint_id=shared(name))

    return check


def resumes(source: str, target: str | None, step: int, **options: Any) -> Check:
    """Goes on as if nothing had happened, with other parameters, another learning rate, and other buckets."""

    def check(rank: int) -> None:
        params = [nn.Parameter(torch.full_like(param, 7.0)) for param in parameters()]
        optimizer = made(params, **{"lr": 1.0, **options})
        state = {"optimizer": optimizer.sharded_state_dict()}
        checkpoint.load(state, checkpoint_id=shared(source))
        optimizer.load_sharded_state_dict(state["optimizer"])
        assert int(optimizer._step) == step
        assert_solved(params, step)
        distributed_step(optimizer, params, step)
        assert_solved(params, step + 1)
        if target is not None:
            checkpoint.save({"optimizer": optimizer.sharded_state_dict()}, checkpoint_id=shared(target))

    return check
