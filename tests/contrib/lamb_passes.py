"""Backward passes around DistributedFusedLAMB: several for a step, partial, cleared early, failed, as clients do."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from apex.contrib.optimizers.distributed_fused_lamb import DistributedFusedLAMB
from apex.optimizers import FusedLAMB
from tests.contrib.lamb_problem import (
    HYPER,
    STEPS,
    assert_solved,
    averaged,
    backward,
    distributed_step,
    groups,
    made,
    parameters,
    part,
    share,
    solved,
)
from tests.parallel.processes import Check, assert_same_everywhere


def accumulation(**options: Any) -> Check:
    """Two backward passes a step; the first is not reduced."""

    def check(rank: int) -> None:
        params = parameters()
        optimizer = made(params, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            gradients = share(step, params)
            optimizer.set_is_accumulation_step(True)
            backward(params, [gradient * 0.25 for gradient in gradients])
            optimizer.set_is_accumulation_step(False)
            optimizer.set_last_step(step == STEPS - 1)
            backward(params, [gradient * 0.75 for gradient in gradients])
            optimizer.complete_reductions()
            optimizer.step()
        assert_solved(params, STEPS)

    return check


def accumulation_undeclared(rank: int) -> None:
    """A second backward pass without a word, of some parameters only, is not lost; or refused if it is too late."""
    params = parameters()
    optimizer = made(params, overlap_reductions=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        gradients = share(step, params)
        split = [0.5 if index % 2 else 1.0 for index in range(len(params))]
        backward(params, [gradient * factor for gradient, factor in zip(gradients, split, strict=True)])
        backward(params[1::2], [gradient * 0.5 for gradient in gradients[1::2]])
        optimizer.step()
    assert_solved(params, STEPS)
    params = parameters()
    optimizer = made(params)
    distributed_step(optimizer, params, 0)
    optimizer.zero_grad()
    backward(params, share(1, params))
    with pytest.raises(RuntimeError, match="set_is_accumulation_step"):
        backward(params, share(1, params))
    optimizer.complete_reductions()


def unused(rank: int) -> None:
    """A parameter without gradient in some processes, or in all, has zeros there."""
    params = parameters()
    optimizer = made(params, dwu_num_blocks=8)

    def left_out(step: int, process: int) -> set[int]:
        return {0, 3} if step == 1 else {4} if step == 2 and process == 0 else set()

    def gradients(step: int, params: Sequence[Tensor]) -> list[Tensor]:
        count = dist.get_world_size()
        found = []
        for index, param in enumerate(params):
            shares = [torch.zeros(param.shape)]
            for number in range(4):
                if index not in left_out(step, number * count // 4):
                    shares.append(part(step, number, params)[index] / 4)
            found.append(sum(shares))
        return found

    for step in range(STEPS):
        optimizer.zero_grad()
        own = share(step, params)
        used = [index for index in range(len(params)) if index not in left_out(step, rank)]
        backward([params[index] for index in used], [own[index] for index in used])
        # What a script may do in between, when this process has sent more, or less, than others.
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [dist.get_world_size()] * 3
        optimizer.step()
    expected = solved(FusedLAMB, torch.float32, STEPS, gradients=gradients)
    for found, truth in zip(params, expected, strict=True):
        torch.testing.assert_close(found.detach(), truth, rtol=1e-5, atol=1e-6)


def as_clients_do(rank: int) -> None:
    """The loop of BERT's training scripts: lazy stages, a learning rate on the device, halves made late."""
    torch.manual_seed(rank)  # processes start differently; process 0 is right
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = DistributedFusedLAMB(
        net.parameters(), lr=123.0, overlap_reductions=True, dwu_num_blocks=2, dwu_num_chunks=2, max_grad_norm=1.0
    )
    optimizer.set_global_scale(128.0)
    optimizer._reduce_scatter_no_copy = optimizer._all_gather_no_copy = True
    net.bfloat16()
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    losses = []
    inputs, targets = torch.randn(16, 5).bfloat16(), torch.randn(16, 3).bfloat16()
    for step in range(8):
        loss = (net(inputs) - targets).square().mean()
        optimizer._lazy_init_stage1()
        scaler.scale(loss).backward()
        optimizer._lazy_init_stage2()
        if step % 2:
            optimizer._lr = torch.tensor(0.02)
        else:
            optimizer._lr.copy_(torch.tensor(0.02))
        optimizer.complete_reductions()
        optimizer.set_global_scale(scaler._get_scale_async())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert_same_everywhere(list(net.parameters()))


def reentrant(rank: int) -> None:
    """Gradients that one backward pass adds to several times; and a pass that fails halfway."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"first": nn.Linear(4, 4), "shared": nn.Linear(4, 4), "last": nn.Linear(4, 2)})
    twin = copy.deepcopy(net)
    options = {**HYPER, "weight_decay": 0.1}
    optimizer, reference = DistributedFusedLAMB(net.parameters(), **options), FusedLAMB(twin.parameters(), **options)

    def loss(model: nn.ModuleDict, step: int, process: int) -> Tensor:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + process))
        x = model["first"](x)
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(model["shared"](y)), x, use_reentrant=True)
        return model["last"](x).square().mean()

    for step in range(STEPS):
        optimizer.zero_grad()
        if step == 2:
            with pytest.raises(ZeroDivisionError):
                (loss(net, step, rank) + Failing.apply(net["first"].weight.sum())).backward()
            optimizer.zero_grad()
        loss(net, step, rank).backward()
        optimizer.step()
        reference.zero_grad()
        for process in range(dist.get_world_size()):
            loss(twin, step, process).div(dist.get_world_size()).backward()
        reference.step()
    for found, truth in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.detach(), truth.detach(), rtol=1e-4, atol=1e-6)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError


def early_zero_grad(**options: Any) -> Check:
    """Gradients may be cleared as soon as the backward pass is over."""

    def check(rank: int) -> None:
        params = parameters()
        optimizer = made(params, **options)
        for step in range(STEPS):
            backward(params, share(step, params))
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            optimizer.complete_reductions()
            optimizer.step()
        assert_solved(params, STEPS)

    return check


def closure_and_schedule(rank: int) -> None:
    params = parameters()
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = DistributedFusedLAMB([*groups(params), {"params": [frozen]}], **HYPER)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    other = [nn.Parameter(param.detach().clone()) for param in params]
    reference = FusedLAMB(groups(other), **HYPER)
    reference_schedule = torch.optim.lr_scheduler.ExponentialLR(reference, 0.5)
    for step in range(STEPS):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            backward(params, share(step, params))
            return 7.0

        assert optimizer.step(closure) == 7.0
        schedule.step()
        for param, gradient in zip(other, averaged(step, other), strict=True):
            param.grad = gradient
        reference.step()
        reference_schedule.step()
    for found, truth in zip(params, other, strict=True):
        torch.testing.assert_close(found.detach(), truth.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(frozen, torch.ones(3))
