"""Groups that start late: every group has its own count of steps, as in torch.optim and FusedAdam."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from apex.booster._zero import divided_state
from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex.contrib.optimizers.distributed_fused_muon import DistributedFusedMuon
from apex.optimizers import FusedAdam, FusedMuon
from apex.transformer import checkpoint
from apex.zero.low_level import LowLevelZeroOptimizer
from tests.parallel.processes import Check

SHAPES = [(5, 3), (4,), (3, 3)]
# The step in which the parameters of each group are trained for the first time, and a step that overflows.
FIRST, OVERFLOWS, STEPS = (0, 2, 4), 1, 6
LR = 0.01
Make = Callable[[list[dict[str, Any]]], Any]


def start() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give(params: list[nn.Parameter], step: int, ranks: list[int]) -> None:
    """Give every parameter that is trained the mean gradient of ranks, multiples of 1/8."""
    for index, param in enumerate(params):
        of_ranks = (torch.Generator().manual_seed(100 * step + 10 * index + rank) for rank in ranks)
        sums = sum(torch.randint(-9, 10, param.shape, generator=each) for each in of_ranks) / 8 / len(ranks)
        param.grad = torch.as_tensor(sums, dtype=param.dtype) if param.requires_grad else None


def train(
    optimizer: Any, params: list[nn.Parameter], ranks: list[int], steps: range = range(STEPS), scaled: bool = False
) -> None:
    """Train: the second group is frozen at first, the third one is added late; skip the step that overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=scaled)
    scaler.scale(torch.ones(()))
    for step in steps:
        if step == FIRST[1]:
            params[1].requires_grad_(True)
        if step == FIRST[2] and len(optimizer.param_groups) == 2:
            more = {"algorithm": "adamw"} if isinstance(optimizer, (FusedMuon, DistributedFusedMuon)) else {}
            optimizer.add_param_group({"params": [params[2]], **more})
        skips = step == OVERFLOWS
        optimizer.zero_grad()
        if skips and not scaled:
            continue
        give(params[: len(optimizer.param_groups)], step, ranks)
        if skips and 0 in ranks:
            params[0].grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update(1.0)


def first_groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    params[1].requires_grad_(False)
    return [{"params": [params[0]]}, {"params": [params[1]]}]


@functools.cache
def whole(make: Make) -> tuple[list[nn.Parameter], dict[str, Any]]:
    """Parameters and state of one process that gets everybody's gradients."""
    params = start()
    if make is adamw:
        params = [nn.Parameter(param.detach().double()) for param in params]
    optimizer = make(first_groups(params))
    train(optimizer, params, list(range(dist.get_world_size())))
    return params, optimizer.state_dict()


def adamw(groups: list[dict[str, Any]]) -> Any:
    return torch.optim.AdamW(groups, lr=LR, weight_decay=0.0)


def adam(groups: list[dict[str, Any]]) -> Any:
    return FusedAdam(groups, lr=LR)


def muon(groups: list[dict[str, Any]]) -> Any:
    """Groups for AdamW: matrices for Muon have no count."""
    return FusedMuon([{**group, "algorithm": "adamw"} for group in groups], lr=LR, betas=(0.9, 0.999))


def close(found: list[nn.Parameter], truth: list[nn.Parameter]) -> None:
    """Compare the moves with those in float64: sums of at most STEPS moves of LR, each of some float32 operations."""
    for one, other, before in zip(found, truth, start(), strict=True):
        torch.testing.assert_close(one.double() - before.double(), other.double() - before.double(), rtol=0, atol=1e-6)


def late(kind: Any, reference: Make, scaled: bool = False, **options: Any) -> Check:
    """Groups that are trained late make the first moves that torch's AdamW makes, and go on so when they are loaded."""

    def made(groups: list[dict[str, Any]]) -> Any:
        groups = [{**group, "algorithm": "adamw"} for group in groups] if kind is DistributedFusedMuon else groups
        return kind(groups, lr=LR, **options)

    def check(rank: int) -> None:
        params = start()
        optimizer = made(first_groups(params))
        train(optimizer, params, [rank], scaled=scaled)
        optimizer.param_sync()
        truth, theirs = copy.deepcopy(whole(reference))
        close(params, truth)
        saved = optimizer.state_dict()
        assert [group["step"] for group in saved["param_groups"]] == [STEPS - 1 - max(0, first - 1) for first in FIRST]
        shards = [optimizer.state_dict(state_dict_format=1)]
        dist.broadcast_object_list(shards)
        folder = [tempfile.mkdtemp() if rank == 0 else ""]
        dist.broadcast_object_list(folder)
        dcp.save({"optimizer": optimizer.sharded_state_dict()}, checkpoint_id=folder[0])
        checkpoint.save(folder[0] + "/model", nn.ParameterList(params), optimizer)
        more, ranks = range(STEPS, STEPS + 2), list(range(dist.get_world_size()))
        exact = [nn.Parameter(param.detach().clone()) for param in truth]
        going_on = reference([{"params": [param]} for param in exact])
        going_on.load_state_dict(copy.deepcopy(theirs))
        train(going_on, exact, ranks, more)
        for each in (saved, shards[0], theirs, "sharded", "with a model"):
            twins = [nn.Parameter(param.detach().clone()) for param in params]
            twin = made([{"params": [param]} for param in twins])
            if each == "with a model":
                checkpoint.load(folder[0] + "/model", nn.ParameterList(twins), twin)
            elif each == "sharded":
                state = {"optimizer": twin.sharded_state_dict()}
                dcp.load(state, checkpoint_id=folder[0])
                twin.load_sharded_state_dict(state["optimizer"])
            else:
                twin.load_state_dict(each)
            train(twin, twins, [rank], more)
            twin.param_sync()
            close(twins, exact)
        other = [nn.Parameter(param.detach().clone()) for param in params]
        fused = (muon if kind is DistributedFusedMuon else adam)([{"params": [param]} for param in other])
        fused.load_state_dict(saved)
        train(fused, other, ranks, more)
        close(other, exact)

    return check


def earlier_versions(rank: int) -> None:
    """A state dict without counts of groups gives every group the optimizer's."""
    params = start()
    optimizer = adam_of(params)
    train(optimizer, params, [rank], range(2, 4))
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["step"]
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    twin = adam_of(twins)
    twin.load_state_dict(saved)
    assert [group["step"] for group in twin.state_dict()["param_groups"]] == [2, 2, 2]
    for each, own in ((optimizer, params), (twin, twins)):
        train(each, own, [rank], range(4, 6))
    assert all(map(torch.equal, params, twins))


def adam_of(params: list[nn.Parameter]) -> DistributedFusedAdam:
    return DistributedFusedAdam([{"params": [param]} for param in params], lr=LR)


def in_plain_format(rank: int) -> None:
    """A divided torch.optim.AdamW saves its parameters' counts, as torch.optim.AdamW itself does."""
    params = start()
    optimizer = LowLevelZeroOptimizer(adamw(first_groups(params)), partition_grad=False)
    train(optimizer.optim, params, [rank])
    saved, theirs = optimizer.state_dict(), whole(adamw)[1]
    assert all("step" not in group for group in saved["param_groups"])
    assert {key: state["step"] for key, state in saved["state"].items()} == {0: 5.0, 1: 4.0, 2: 2.0}
    assert {key: state["step"] for key, state in theirs["state"].items()} == {0: 5.0, 1: 4.0, 2: 2.0}
    _, read, _ = divided_state(optimizer.optim, keep=True)
    assert {key: state["step"] for key, state in read([0, 1, 2]).items()} == {0: 5.0, 1: 4.0, 2: 2.0}


CHECKS: dict[str, Check] = {
    "late_groups": late(DistributedFusedAdam, adamw),
    "late_groups_scaled": late(DistributedFusedAdam, adamw, scaled=True),
    "late_groups_capturable": late(DistributedFusedAdam, adam, scaled=True, capturable=True),
    "late_groups_muon": late(DistributedFusedMuon, muon, betas=(0.9, 0.999)),
    "counts_in_plain_format": in_plain_format,
    "counts_of_earlier_versions": earlier_versions,
}
